"""Measure what a stage needs beside its layers: its own work on a microbatch, and its messages.

All of it happens right after other work, with cold caches and sleeping threads, and is measured so:
hot loops show a fifth of it.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.pipeline.stage import Activation, Held, Stage, is_finite
from elastic_trainer.transport.channel import Channel, Message, Tag
from elastic_trainer.transport.tree import flatten
from elastic_trainer.types import Overheads, Profile, StagePlan

PAUSE_S = 0.003  # so long sleep threads between actions, at the least
CACHE_BYTES = 4 << 20  # what other work has put in the place of ours meanwhile
REPEATS = 9
SMALL_BYTES, BIG_BYTES = 4096, 1 << 20
_META = {"tree": ["t", 0], "grad": [True]}
_LIMIT_S = 10.0


class Taken(NamedTuple):
    """Seconds, and those of them in which this thread had a core; the fastest is the smallest."""

    seconds: float
    cpu_s: float

    @classmethod
    def now(cls) -> "Taken":
        return cls(time.perf_counter(), time.thread_time())

    def since(self, begin: "Taken") -> "Taken":
        # The two clocks tick apart: a core is never needed for longer than it takes.
        seconds = self.seconds - begin.seconds
        return Taken(seconds, min(seconds, self.cpu_s - begin.cpu_s))


def _median(taken: Sequence[Taken]) -> Taken:
    return Taken(*(statistics.median(column) for column in zip(*taken, strict=True)))


def measure_stage(config: Config, activation: Tensor) -> Overheads:
    """Time a stage whose only layer does nothing, on an activation of the model's usual size."""
    nothing = tuple(LayerSpec(f"nothing.{i}", nn.Identity) for i in range(3))
    model = ModelSpec(nothing, lambda output, fields: output.sum())
    stage = Stage(
        StagePlan(stage=1, first=1, stop=2, worker=""), 3, model, config, activation.device
    )
    stage.begin(training=True)
    forward: list[Taken] = []
    backward: list[Taken] = []
    for index in range(REPEATS):
        tensor = activation.detach().clone()
        spec, tensors = flatten(tensor)
        _cool_down()
        begin = Taken.now()
        _, held = stage.forward(index, 0, Activation(spec, tensors, [True]), {})
        forward.append(Taken.now().since(begin))
        _cool_down()
        backward.append(_beside_autograd(stage, held))
    forth, back = _median(forward), _median(backward)
    return Overheads(
        forward_s=forth.seconds,
        backward_s=back.seconds,
        forward_cpu_s=forth.cpu_s,
        backward_cpu_s=back.cpu_s,
    )


def _cool_down() -> None:
    """Sleep, and use the caches for something else."""
    time.sleep(PAUSE_S)
    bytearray(CACHE_BYTES).count(1)


def _beside_autograd(stage: Stage, held: Held) -> Taken:
    """What a backward and its checks take, but for autograd's own, which layers are charged."""
    grads = [torch.ones_like(output) for output in held.outputs]
    begin = Taken.now()
    for grad in stage.backward(held, grads):
        assert grad is None or is_finite(grad)
    whole = Taken.now().since(begin)
    _cool_down()
    leaf = torch.zeros(1, requires_grad=True)
    output = leaf.view(1)
    begin = Taken.now()
    torch.autograd.backward([output], [torch.ones(1)])
    own = Taken.now().since(begin)
    seconds = max(0.0, whole.seconds - own.seconds)
    return Taken(seconds, min(seconds, max(0.0, whole.cpu_s - own.cpu_s)))


def measure_messages(open_channel: Callable[[str], Channel]) -> Overheads:
    """Time messages between two channels of this process, small ones and big ones.

    Args:
        open_channel: opens a channel of the kind that stages use; given a name.
    """
    here, there = open_channel("here"), open_channel("there")
    try:
        here.connect("there", there.address())
        there.connect("here", here.address())
        small = _send_some(here, there, SMALL_BYTES, 0)
        big = _send_some(here, there, BIG_BYTES, REPEATS)
    finally:
        here.close()
        there.close()
    return Overheads(
        send_s=small[0].seconds,
        send_cpu_s=small[0].cpu_s,
        send_s_per_byte=_per_byte(big[0].seconds, small[0].seconds),
        link_s=small[1],
        link_s_per_byte=_per_byte(big[1], small[1]),
    )


def _per_byte(big_s: float, small_s: float) -> float:
    return max(0.0, (big_s - small_s) / (BIG_BYTES - SMALL_BYTES))


def _send_some(here: Channel, there: Channel, num_bytes: int, first: int) -> tuple[Taken, float]:
    """What a send takes, and seconds from its end to the message's arrival; medians."""
    arrived: list[float] = []
    tags = [Tag(0, "F", step, 0) for step in range(first, first + REPEATS)]

    def receive() -> None:
        for tag in tags:
            there.recv("here", tag, _LIMIT_S)
            arrived.append(time.perf_counter())

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    message = Message([torch.zeros(num_bytes // 4)], dict(_META))
    sends, ends = [], []
    for tag in tags:
        _cool_down()
        begin = Taken.now()
        here.send("there", tag, message)
        end = Taken.now()
        ends.append(end.seconds)
        sends.append(end.since(begin))
    receiver.join(_LIMIT_S)
    links = [max(0.0, at - end) for at, end in zip(arrived, ends, strict=True)]
    return _median(sends), statistics.median(links)


def with_messages(profile: Profile, open_channel: Callable[[str], Channel]) -> Profile:
    """The profile, with what messages cost on such channels."""
    messages = measure_messages(open_channel)
    own = profile.overheads
    both = replace(
        messages,
        forward_s=own.forward_s,
        backward_s=own.backward_s,
        forward_cpu_s=own.forward_cpu_s,
        backward_cpu_s=own.backward_cpu_s,
    )
    return replace(profile, overheads=both)
