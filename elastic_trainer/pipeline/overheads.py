"""Measure what a stage needs beside its layers: its own work on a microbatch, and its messages.

All of it happens right after other work, with cold caches and sleeping threads, and is measured so:
hot loops show a fifth of it.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

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


def measure_stage(config: Config, activation: Tensor) -> Overheads:
    """Time a stage whose only layer does nothing, on an activation of the model's usual size."""
    nothing = tuple(LayerSpec(f"nothing.{i}", nn.Identity) for i in range(3))
    model = ModelSpec(nothing, lambda output, fields: output.sum())
    stage = Stage(
        StagePlan(stage=1, first=1, stop=2, worker=""), 3, model, config, activation.device
    )
    stage.set_training(True)
    forward, backward = [], []
    for index in range(REPEATS):
        tensor = activation.detach().clone()
        spec, tensors = flatten(tensor)
        _cool_down()
        begin = time.perf_counter()
        _, held = stage.forward(index, 0, Activation(spec, tensors, [True]), {})
        forward.append(time.perf_counter() - begin)
        _cool_down()
        backward.append(_beside_autograd(stage, held))
    return Overheads(forward_s=statistics.median(forward), backward_s=statistics.median(backward))


def _cool_down() -> None:
    """Sleep, and use the caches for something else."""
    time.sleep(PAUSE_S)
    bytearray(CACHE_BYTES).count(1)


def _beside_autograd(stage: Stage, held: Held) -> float:
    """Seconds of a backward and its checks, but for autograd's own, which layers are charged."""
    grads = [torch.ones_like(output) for output in held.outputs]
    begin = time.perf_counter()
    for grad in stage.backward(held, grads):
        assert grad is None or is_finite(grad)
    total = time.perf_counter() - begin
    _cool_down()
    leaf = torch.zeros(1, requires_grad=True)
    output = leaf.view(1)
    begin = time.perf_counter()
    torch.autograd.backward([output], [torch.ones(1)])
    return max(0.0, total - (time.perf_counter() - begin))


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
    per_byte = [
        max(0.0, (of_big - of_small) / (BIG_BYTES - SMALL_BYTES))
        for of_big, of_small in zip(big, small, strict=True)
    ]
    return Overheads(
        send_s=small[0], send_s_per_byte=per_byte[0], link_s=small[1], link_s_per_byte=per_byte[1]
    )


def _send_some(here: Channel, there: Channel, num_bytes: int, first: int) -> tuple[float, float]:
    """Seconds of a send, and from its end to the message's arrival; medians."""
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
        begin = time.perf_counter()
        here.send("there", tag, message)
        ends.append(time.perf_counter())
        sends.append(ends[-1] - begin)
    receiver.join(_LIMIT_S)
    links = [max(0.0, at - end) for at, end in zip(arrived, ends, strict=True)]
    return statistics.median(sends), statistics.median(links)


def with_messages(profile: Profile, open_channel: Callable[[str], Channel]) -> Profile:
    """The profile, with what messages cost on such channels."""
    messages = measure_messages(open_channel)
    own = profile.overheads
    both = replace(messages, forward_s=own.forward_s, backward_s=own.backward_s)
    return replace(profile, overheads=both)
