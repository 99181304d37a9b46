"""Pictures, sound and text to text: two encoders, their projectors, and a language model.

Layers: `vision.embed`, `vision.blocks.0` …, `vision.project`, `audio.embed`, `audio.blocks.0` …,
`audio.project`, `lm.embed`, `lm.blocks.0` …, `lm.head`. A cut may fall between any two of them.

What flows between layers is a dict of `image`, `audio` and `x` (the language model's sequence).
None stands for what a microbatch has none of: nothing is sent for it then, and parameters that saw
nothing get gradients of zero. The fields are those of `data/media/collate.py`: pictures, clips and
samples lie one behind the other, without padding, and none attends to another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models import outline
from elastic_trainer.models.gpt import INIT_STD
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.models.losses import IGNORE, first_label
from elastic_trainer.models.packed import PackedBlock, places_within, waves
from elastic_trainer.planner.sizes import (
    AUDIO_PLACE,
    FRAMES_PER_TOKEN,
    IMAGE_PLACE,
    PATCHES_PER_TOKEN,
)

Flow = dict[str, Tensor | None]
_CHANNELS = 3
_HALF_RANGE = 127.5  # of a byte
_KERNEL, _STRIDE = 3, 2  # of each of the two convolutions over sound


class VisionEmbed(nn.Module):
    """Patches of any number of pictures, each with its row and column."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(_CHANNELS * patch_size**2, dim)

    def forward(self, fields: Mapping[str, Tensor]) -> Flow:
        patches, grid = fields["patches"], fields["patch_grid"]
        if not len(patches):
            return {"image": None, "audio": None, "x": None}
        if patches.shape[1] != self.linear.in_features:
            raise ModelError(
                f"Patches have {patches.shape[1]} numbers, the model wants "
                f"{self.linear.in_features}",
                "Set model.args.patch_size to data.patch_size",
            )
        dim = self.linear.out_features
        x = self.linear(patches.to(self.linear.weight.dtype) / _HALF_RANGE - 1)
        rows, columns = grid.unbind(1)
        place = torch.cat([waves(rows, dim // 2), waves(columns, dim - dim // 2)], dim=1)
        return {"image": x + place.to(x.dtype), "audio": None, "x": None}


class AudioEmbed(nn.Module):
    """Log-mel frames of any number of clips; two convolutions make one token of four frames."""

    def __init__(self, mel_bins: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(mel_bins, dim, _KERNEL, _STRIDE, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, _KERNEL, _STRIDE, padding=1)

    def forward(self, value: Flow, frames: Tensor, clip_lengths: Tensor) -> Flow:
        if not len(frames):
            return value
        if frames.shape[1] != self.conv1.in_channels:
            raise ModelError(
                f"Sound has {frames.shape[1]} bands, the model wants {self.conv1.in_channels}",
                "Set model.args.mel_bins to data.mel_bins",
            )
        # All clips in one row, with so much silence between them that none hears another.
        tokens = -(-clip_lengths // FRAMES_PER_TOKEN)
        room = tokens + 1
        starts = room.cumsum(0) - room
        row = self._in_row(frames, starts * FRAMES_PER_TOKEN, clip_lengths, int(room.sum()))
        half = F.gelu(self.conv1(row))
        # A clip by itself would be padded with zeros here, too.
        middle = -(-clip_lengths // _STRIDE)
        mask = half.new_zeros(half.shape[-1])
        mask[self._places(starts * _STRIDE, middle)] = 1
        whole = F.gelu(self.conv2(half * mask))[0].transpose(0, 1)
        x = whole[self._places(starts, tokens)]
        x = x + waves(places_within(tokens), x.shape[1]).to(x.dtype)
        return {**value, "audio": x}

    def _in_row(self, frames: Tensor, starts: Tensor, lengths: Tensor, room: int) -> Tensor:
        row = frames.new_zeros(room * FRAMES_PER_TOKEN, frames.shape[1])
        row[self._places(starts, lengths)] = frames
        return row.to(self.conv1.weight.dtype).transpose(0, 1)[None]

    @staticmethod
    def _places(starts: Tensor, lengths: Tensor) -> Tensor:
        return torch.repeat_interleave(starts, lengths) + places_within(lengths)


class EncoderBlock(nn.Module):
    """A block over the pictures, or over the clips, of a microbatch.

    Args:
        flow: image or audio.
        per_token: items that a length counts, for one token.
    """

    def __init__(self, flow: str, per_token: int, **block: Any) -> None:
        super().__init__()
        self.flow = flow
        self.per_token = per_token
        self.block = PackedBlock(**block)

    def forward(self, value: Flow, **lengths: Tensor) -> Flow:
        x = value[self.flow]
        if x is None:
            return value
        (counts,) = lengths.values()
        tokens = (-(-counts // self.per_token)).tolist()
        return {**value, self.flow: self.block.run(x, tokens)}


class Project(nn.Module):
    """From an encoder's tokens to those of the language model, `joined` neighbours to one."""

    def __init__(self, flow: str, joined: int, dim: int) -> None:
        super().__init__()
        self.flow = flow
        self.joined = joined
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(joined * dim, dim)
        self.down = nn.Linear(dim, dim)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=INIT_STD)
            nn.init.zeros_(linear.bias)

    def forward(self, value: Flow) -> Flow:
        x = value[self.flow]
        if x is None:
            return value
        y = self.norm(x).view(len(x) // self.joined, -1)
        return {**value, self.flow: self.down(F.gelu(self.up(y)))}


class Gather(nn.Module):
    """Token embeddings, with what the encoders saw and heard at the places kept for it."""

    def __init__(self, vocab_size: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.dropout = dropout
        nn.init.normal_(self.tokens.weight, std=INIT_STD)

    def forward(self, value: Flow, input_ids: Tensor, positions: Tensor) -> Flow:
        ids = input_ids[0]
        if len(ids) and int(ids.max()) >= self.tokens.num_embeddings:
            raise ModelError(
                f"Token id {int(ids.max())} is outside the vocabulary of "
                f"{self.tokens.num_embeddings}",
                "Set model.args.vocab_size to the tokenizer's",
            )
        x = self.tokens(ids.clamp_min(0))
        for flow, place in (("image", IMAGE_PLACE), ("audio", AUDIO_PLACE)):
            x = self._put(x, value[flow], (ids == place).nonzero()[:, 0], flow)
        # As large as the embeddings are at first, so that neither hides the other.
        x = x + INIT_STD * waves(positions[0], x.shape[1]).to(x.dtype)
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return {"image": None, "audio": None, "x": x}

    @staticmethod
    def _put(x: Tensor, found: Tensor | None, places: Tensor, flow: str) -> Tensor:
        have = 0 if found is None else len(found)
        if have != len(places):
            raise ModelError(f"{have} tokens of {flow} came for {len(places)} places")
        return x if found is None else x.index_copy(0, places, found.to(x.dtype))


class LanguageBlock(nn.Module):
    """A causal block over the samples of a microbatch."""

    def __init__(self, **block: Any) -> None:
        super().__init__()
        self.block = PackedBlock(**block)

    def forward(self, value: Flow, segments: Tensor) -> Flow:
        x = value["x"]
        assert x is not None  # Gather made it
        _, lengths = torch.unique_consecutive(segments[0], return_counts=True)
        return {**value, "x": self.block.run(x, lengths.tolist())}


class TextHead(nn.Module):
    """Final norm and the linear map to logits, of the positions that have a label only."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.linear.weight, std=INIT_STD)

    def forward(self, value: Flow, labels: Tensor) -> Tensor:
        x = value["x"]
        assert x is not None  # Gather made it
        logits: Tensor = self.linear(self.norm(x[labels[0] != IGNORE]))
        return logits


def text_loss(output: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """Sum of cross-entropies over the positions that have a label, as `TextHead` gives them."""
    label = first_label(labels)
    return F.cross_entropy(output.float(), label[label != IGNORE], reduction="sum")


def multimodal(
    *,
    vocab_size: int,
    patch_size: int = 16,
    mel_bins: int = 40,
    vision_layers: int = 3,
    audio_layers: int = 2,
    lm_layers: int = 4,
    dim: int = 128,
    num_heads: int = 4,
    dropout: float = 0.0,
    freeze: Sequence[str] = (),
    tie_embeddings: bool = False,
) -> ModelSpec:
    """Vision encoder, audio encoder and language model of these numbers of blocks.

    Args:
        dropout: in blocks that are trained; frozen ones have none.
        freeze: encoders that stay as they are (vision, audio); their projectors are trained.
    """
    outline.multimodal(
        vocab_size=vocab_size,
        patch_size=patch_size,
        mel_bins=mel_bins,
        vision_layers=vision_layers,
        audio_layers=audio_layers,
        lm_layers=lm_layers,
        dim=dim,
        num_heads=num_heads,
        dropout=dropout,
        freeze=freeze,
    )
    num_blocks_of = {"vision": vision_layers, "audio": audio_layers, "lm": lm_layers}
    blocks = {
        name: {
            "dim": dim,
            "num_heads": num_heads,
            "num_blocks": num_blocks,
            "causal": name == "lm",
            "dropout": 0.0 if name in freeze else dropout,
        }
        for name, num_blocks in num_blocks_of.items()
    }
    layers = (
        *_encoder(
            LayerSpec("vision.embed", partial(VisionEmbed, patch_size, dim)),
            _encoder_block("image", 1, "image_lengths", blocks["vision"]),
            vision_layers,
            frozen="vision" in freeze,
        ),
        LayerSpec("vision.project", partial(Project, "image", PATCHES_PER_TOKEN, dim)),
        *_encoder(
            LayerSpec(
                "audio.embed", partial(AudioEmbed, mel_bins, dim), {}, ("frames", "clip_lengths")
            ),
            _encoder_block("audio", FRAMES_PER_TOKEN, "clip_lengths", blocks["audio"]),
            audio_layers,
            frozen="audio" in freeze,
        ),
        LayerSpec("audio.project", partial(Project, "audio", 1, dim)),
        *_language(vocab_size, blocks["lm"], lm_layers, tie=tie_embeddings),
    )
    return ModelSpec(layers, text_loss, ("patches", "patch_grid"), ("labels",))


def _encoder_block(flow: str, per_token: int, lengths: str, block: dict[str, Any]) -> LayerSpec:
    name = {"image": "vision", "audio": "audio"}[flow]
    build = partial(EncoderBlock, flow, per_token, **block)
    return LayerSpec(f"{name}.blocks", build, {}, (lengths,))


def _language(
    vocab_size: int, block: dict[str, Any], num_blocks: int, *, tie: bool
) -> list[LayerSpec]:
    dim = block["dim"]
    embed = partial(Gather, vocab_size, dim, block["dropout"])
    tied = {"linear.weight": "lm.embed.tokens.weight"} if tie else {}
    return [
        LayerSpec("lm.embed", embed, {}, ("input_ids", "positions")),
        *[
            LayerSpec(f"lm.blocks.{i}", partial(LanguageBlock, **block), {}, ("segments",))
            for i in range(num_blocks)
        ],
        LayerSpec("lm.head", partial(TextHead, vocab_size, dim), tied, ("labels",)),
    ]


def _encoder(
    embed: LayerSpec, block: LayerSpec, num_blocks: int, *, frozen: bool
) -> list[LayerSpec]:
    if frozen:
        embed, block = (replace(s, build=partial(_frozen, s.build)) for s in (embed, block))
    return [embed, *[replace(block, name=f"{block.name}.{i}") for i in range(num_blocks)]]


def _frozen(build: Callable[[], nn.Module]) -> nn.Module:
    return build().requires_grad_(False)
