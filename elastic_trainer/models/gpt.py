"""A GPT whose numbers agree with GPT-2's: learned positions, norm first, GELU, no bias on the head.

Layers: `embed`, `blocks.0` …, `head` (final norm and linear).
"""

import math
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models import outline
from elastic_trainer.models.layers import HuggingFaceLayout, LayerSpec, ModelSpec
from elastic_trainer.models.losses import cross_entropy

GELU_APPROXIMATION = {"exact": "none", "tanh": "tanh"}
INIT_STD = 0.02


class Embed(nn.Module):
    """Token and position embeddings, then dropout."""

    def __init__(self, vocab_size: int, max_positions: int, dim: int, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_positions, dim)
        self.dropout = dropout
        nn.init.normal_(self.tokens.weight, std=INIT_STD)
        nn.init.normal_(self.positions.weight, std=INIT_STD)

    def forward(self, input_ids: Tensor) -> Tensor:
        length, limit = input_ids.shape[1], self.positions.num_embeddings
        if length > limit:
            raise ModelError(
                f"A sequence of {length} tokens is longer than the model's {limit} positions",
                "Raise model.args.max_positions, or lower data.sequence_length",
            )
        # The first rows of the table, in order: no lookup is needed.
        x: Tensor = self._look_up(input_ids) + self.positions.weight[:length]
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def _look_up(self, input_ids: Tensor) -> Tensor:
        try:
            rows: Tensor = self.tokens(input_ids)
        except IndexError as error:  # CPU only: CUDA asserts on the device
            raise ModelError(
                f"Token id {int(input_ids.max())} is outside the vocabulary of "
                f"{self.tokens.num_embeddings}",
                "Set model.args.vocab_size to the tokenizer's",
            ) from error
        return rows


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind its norm and added to the stream."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        gelu: str = "tanh",
        causal: bool = True,
        num_blocks: int = 1,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.approximation = GELU_APPROXIMATION[gelu]
        self.causal = causal
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        # GPT-2 draws what is added to the stream smaller, the more blocks add to it.
        residual = INIT_STD / math.sqrt(2 * num_blocks)
        for linear, std in (
            (self.qkv, INIT_STD),
            (self.proj, residual),
            (self.up, INIT_STD),
            (self.down, residual),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.proj(self._attend(self.norm1(x))))
        y = F.gelu(self.up(self.norm2(x)), approximate=self.approximation)
        return x + self._drop(self.down(y))

    def _attend(self, x: Tensor) -> Tensor:
        size, length, dim = x.shape
        qkv = self.qkv(x).view(size, length, 3, self.num_heads, dim // self.num_heads)
        # Taken apart first: then their gradients are put together without another copy.
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=drop)
        return y.transpose(1, 2).reshape(size, length, dim)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Head(nn.Module):
    """Final norm and the linear map to logits."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.linear.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        return logits


def gpt(
    *,
    vocab_size: int,
    num_layers: int = 4,
    dim: int = 128,
    num_heads: int = 4,
    max_positions: int = 128,
    dropout: float = 0.0,
    tie_embeddings: bool = False,
    gelu: str = "tanh",
) -> ModelSpec:
    """A decoder-only language model of `num_layers` blocks."""
    outline.gpt(
        vocab_size=vocab_size,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        max_positions=max_positions,
        dropout=dropout,
        gelu=gelu,
    )
    block = partial(Block, dim, num_heads, dropout=dropout, gelu=gelu, num_blocks=num_layers)
    layers = [
        LayerSpec("embed", partial(Embed, vocab_size, max_positions, dim, dropout)),
        *[LayerSpec(f"blocks.{i}", block) for i in range(num_layers)],
        LayerSpec(
            "head",
            partial(Head, dim, vocab_size),
            tied={"linear.weight": "embed.tokens.weight"} if tie_embeddings else {},
        ),
    ]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": max_positions,
        "n_embd": dim,
        "n_layer": num_layers,
        "n_head": num_heads,
        "activation_function": "gelu" if gelu == "exact" else "gelu_new",
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "resid_pdrop": dropout,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    layout = HuggingFaceLayout(config, to_gpt2)
    return ModelSpec(tuple(layers), cross_entropy, max_positions=max_positions, hugging_face=layout)


_GPT2_NAMES = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "linear.weight": "lm_head.weight",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def to_gpt2(layer: str, parameter: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A parameter's name and value in GPT-2's layout, which stores linear weights transposed."""
    if parameter in _GPT2_NAMES:
        return _GPT2_NAMES[parameter], tensor
    module, kind = parameter.rsplit(".", 1)
    if layer == "head":
        return f"{_GPT2_NAMES[module]}.{kind}", tensor
    name = f"transformer.h.{layer.removeprefix('blocks.')}.{_GPT2_NAMES[module]}.{kind}"
    return name, tensor.t().contiguous() if _is_linear(module, kind) else tensor


def _is_linear(module: str, kind: str) -> bool:
    return kind == "weight" and not module.startswith("norm")
