"""A trained model put together again in one process: logits, generated tokens, evaluation."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.layers import (
    ModelSpec,
    Tree,
    build_layers,
    first_input,
    layer_kwargs,
)
from elastic_trainer.models.losses import count_valid

LayerStates = Mapping[str, Mapping[str, Tensor]]


class Unsplit:
    """All layers in one process, in evaluation mode.

    Args:
        model: the layers.
        layer_states: per layer `param/NAME` and `buffer/NAME`, as stages and checkpoints hold them;
            other keys (optimizer state) are passed over. None: the initial weights.
        device: where to compute.
        seed: of the initial weights.
    """

    def __init__(
        self,
        model: ModelSpec,
        layer_states: LayerStates | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.layers = build_layers(model, 0, len(model.layers), seed, device)
        for name, module in self.layers.items():
            module.eval()
            if layer_states is not None:
                load_layer(name, module, layer_states.get(name))

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor]) -> Tree:
        """What the last layer returns for a batch."""
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        x = first_input(self.model, batch)
        for spec in self.model.layers:
            x = self.layers[spec.name](x, **layer_kwargs(spec, batch))
        return x

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits of each position, for language models."""
        if len(self.model.input_fields) != 1:
            raise ModelError(
                f"The model reads {', '.join(self.model.input_fields)}, not text alone",
                "Only language models generate text",
            )
        output = self.forward({self.model.input_fields[0]: input_ids})
        if not isinstance(output, Tensor) or output.dim() != 3:
            raise ModelError(
                "The model returns no logits of shape [batch, length, vocabulary]",
                "Only language models generate text",
            )
        return output

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        eos_id: int | None = None,
    ) -> list[int]:
        """New tokens that continue `tokens`, up to `max_tokens` or the one called `eos_id`.

        Temperature 0 takes the likeliest token each time; `top_k` above 0 draws from that many.
        """
        if not tokens:
            raise ModelError("The prompt has no tokens", "Give at least one")
        if temperature < 0:
            raise ModelError(f"The temperature is {temperature}", "Use 0 or more")
        generator = torch.Generator().manual_seed(seed)
        context, new = list(tokens), list[int]()
        while len(new) < max_tokens:
            window = context[-self.model.max_positions :] if self.model.max_positions else context
            logits = self.logits(torch.tensor([window], device=self.device))[0, -1]
            token = sample(logits.float().cpu(), temperature, top_k, generator)
            new.append(token)
            context.append(token)
            if token == eos_id:
                break
        return new

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]]) -> tuple[float, int]:
        """Sum of the losses and number of valid items; their quotient is the mean loss."""
        losses, num_valid = [], 0
        for batch in batches:
            labels = {
                name: batch[name].to(self.device)
                for name in self.model.label_fields
                if name in batch
            }
            losses.append(float(self.model.loss(self.forward(batch), labels)))
            num_valid += count_valid(labels)
        return math.fsum(losses), num_valid


def sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token from the logits of one position."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        values, indices = logits.topk(top_k)
    else:
        values, indices = logits, torch.arange(logits.numel())
    weights = torch.softmax(values / temperature, dim=0)
    return int(indices[torch.multinomial(weights, 1, generator=generator)])


@torch.no_grad()
def load_layer(name: str, module: nn.Module, state: Mapping[str, Tensor] | None) -> None:
    """Copy a layer's state into its module; each parameter and saved buffer must be there."""
    if state is None:
        raise ModelError(
            f"The state has no layer {name!r}", "It belongs to another model configuration"
        )
    saved = set(module.state_dict())  # what is not saved was made anew when the layer was built
    targets: dict[str, tuple[str, Tensor]] = {}
    targets |= {f"param/{n}": (n, p) for n, p in module.named_parameters()}
    targets |= {f"buffer/{n}": (n, b) for n, b in module.named_buffers()}
    for key, (tensor_name, target) in targets.items():
        if key not in state:
            if tensor_name not in saved:
                continue
            raise ModelError(
                f"The state of layer {name!r} lacks {key!r}",
                "It belongs to another model configuration",
            )
        if state[key].shape != target.shape:
            raise ModelError(
                f"{key!r} of layer {name!r} has shape {tuple(state[key].shape)}, the model wants "
                f"{tuple(target.shape)}",
                "It belongs to another model configuration",
            )
        target.copy_(state[key])
