"""Gradient norms, clipping and the loss scaler.

The global norm is made of one norm per parameter, combined by `math.fsum`, which rounds once: the
result does not depend on where the cuts lie. Stages send their norms to stage 0, which answers all
with the total; no call to the coordinator.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_trainer.config import Config
from elastic_trainer.errors import ConfigError, NonFiniteError, TransportError
from elastic_trainer.transport.channel import Message

_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Norms:
    """One stage's contribution: the norm of each parameter it steps, and whom to blame.

    `bad_layer` is the layer whose gradient is not finite, "" when all are.
    """

    values: Sequence[float]
    stage: int
    bad_layer: str = ""


@dataclass(frozen=True, slots=True)
class GlobalNorm:
    """The norm of all stages' gradients; `bad_stage` is -1 when all are finite."""

    norm: float
    bad_stage: int = -1
    bad_layer: str = ""


def parameter_norms(grads: Sequence[Tensor]) -> list[float]:
    """The 2-norm of each gradient."""
    if not grads:
        return []
    values: list[float] = torch.stack(torch._foreach_norm(list(grads))).tolist()
    return values


def combine(parts: Iterable[Norms]) -> GlobalNorm:
    """The global norm of all stages, and the last stage with a bad gradient, where it arose.

    Gradients flow from the last stage to the first, so the stage nearest the loss is the culprit.
    """
    ordered = sorted(parts, key=lambda part: part.stage)
    total = math.sqrt(math.fsum(value * value for part in ordered for value in part.values))
    for part in reversed(ordered):
        if part.bad_layer:
            return GlobalNorm(total, part.stage, part.bad_layer)
    return GlobalNorm(total)


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients with; 0 as `max_norm` means never clip."""
    return min(1.0, max_norm / (norm + _CLIP_EPS)) if max_norm > 0 else 1.0


def not_finite(update: int, microbatch: int, layer: str, stage: int, what: str) -> NonFiniteError:
    """The error for a NaN or an infinity in the output or gradient of a layer, or in the loss."""
    which = "the loss" if layer == "loss" else f"the {what} of layer {layer!r}"
    where = f"update {update}" + (f", microbatch {microbatch}" if microbatch >= 0 else "")
    return NonFiniteError(
        f"{which} became NaN or infinite in {where}, on stage {stage}",
        "That update was not committed. Lower optim.learning_rate, raise optim.warmup_steps, "
        "or look at the samples of that microbatch",
        update,
        microbatch,
        layer,
        stage,
    )


def norms_to_message(part: Norms) -> Message:
    values = torch.tensor(part.values, dtype=torch.float64)
    return Message([values], {"bad_layer": part.bad_layer})


def norms_from_message(message: Message, stage: int) -> Norms:
    _expect_vector(message)
    return Norms(message.tensors[0].tolist(), stage, str(message.meta.get("bad_layer", "")))


def total_to_message(total: GlobalNorm) -> Message:
    value = torch.tensor([total.norm], dtype=torch.float64)
    return Message([value], {"bad_stage": total.bad_stage, "bad_layer": total.bad_layer})


def total_from_message(message: Message) -> GlobalNorm:
    _expect_vector(message)
    meta = message.meta
    return GlobalNorm(
        float(message.tensors[0]), int(meta.get("bad_stage", -1)), str(meta.get("bad_layer", ""))
    )


def _expect_vector(message: Message) -> None:
    if len(message.tensors) != 1 or message.tensors[0].dim() != 1:
        raise TransportError("a message of norms does not hold one vector")


class LossScaler:
    """Scale of the fp16 loss. Every stage holds one, and feeds it the same outcomes.

    Scales are powers of two, so scaling and unscaling are exact.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale
        self.num_good = 0

    def update(self, overflowed: bool) -> None:
        """Halve after an overflow; double after `GROWTH_INTERVAL` updates without one."""
        if overflowed:
            self.scale *= 0.5
            self.num_good = 0
            return
        self.num_good += 1
        if self.num_good == self.GROWTH_INTERVAL:
            self.scale *= 2.0
            self.num_good = 0

    def refuse_if_hopeless(self, total: "GlobalNorm", update: int) -> None:
        """Give up where no smaller scale can help: the gradients themselves are not finite."""
        if total.bad_stage >= 0 and self.scale <= 1.0:
            raise not_finite(update, -1, total.bad_layer, total.bad_stage, "gradient")

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "num_good": self.num_good}

    def load(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.num_good = int(state["num_good"])


def make_scaler(config: Config, is_async: bool) -> LossScaler | None:
    """The scaler that the precision needs, if any."""
    if config.train.precision != "fp16":
        return None
    if is_async:
        raise ConfigError(
            "train.precision fp16 needs a synchronous schedule: all stages skip an update together",
            "Set train.precision=bf16, or pipeline.schedule=1f1b",
        )
    return LossScaler()
