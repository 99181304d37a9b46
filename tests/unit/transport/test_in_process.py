"""Faults that the in-process network injects."""

import time

import pytest
import torch

from elastic_trainer.errors import StallError, TransportError
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.in_process import Fault, InProcessNetwork
from elastic_trainer.types import WorkerId


def tag(microbatch: int) -> Tag:
    return Tag(0, "F", 1, microbatch)


def test_messages_are_dropped_and_delayed_by_rule() -> None:
    seen: list[tuple[WorkerId, WorkerId, Tag]] = []

    def rule(sender: WorkerId, receiver: WorkerId, tag: Tag) -> Fault:
        seen.append((sender, receiver, tag))
        return Fault(drop=tag.microbatch == 1, delay_s=0.3 if tag.microbatch == 0 else 0.0)

    network = InProcessNetwork(rule)
    a, b = network.channel("a"), network.channel("b")
    start = time.monotonic()
    for i in range(3):
        a.send("b", tag(i), Message([torch.tensor(i)]))
    assert b.recv("a", tag(2), 10).tensors[0].item() == 2
    assert time.monotonic() - start < 0.3, "later messages overtake a delayed one"
    assert b.recv("a", tag(0), 10).tensors[0].item() == 0
    assert time.monotonic() - start >= 0.3
    with pytest.raises(StallError):
        b.recv("a", tag(1), 0.05)
    assert network.num_dropped == 1
    assert seen == [("a", "b", tag(i)) for i in range(3)]


def test_a_message_to_nobody_is_lost_as_on_a_wire() -> None:
    network = InProcessNetwork()
    a, b = network.channel("a"), network.channel("b")
    b.close()
    a.send("b", tag(0), Message([]))
    a.send("c", tag(0), Message([]))
    assert network.num_dropped == 2


def test_an_address_names_its_worker() -> None:
    network = InProcessNetwork()
    a, b = network.channel("a"), network.channel("b")
    a.connect("b", b.address())
    with pytest.raises(TransportError, match="not an in-process address of b"):
        a.connect("b", a.address())
