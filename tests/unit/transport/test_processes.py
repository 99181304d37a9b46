"""Channels between real processes: both ways, variable shapes, and a peer that is killed."""

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

import pytest
import torch

from elastic_trainer.errors import StallError, TransportError
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.torch_channel import TorchChannel
from elastic_trainer.transport.zmq_channel import ZmqChannel

WAIT_S = 30.0
Peer = tuple[ZmqChannel, subprocess.Popen[str]]


def make(kind: str, worker: str) -> ZmqChannel:
    return TorchChannel(worker, timeout_s=5.0) if kind == "torch" else ZmqChannel(worker)


def meet(channel: ZmqChannel, kind: str, peer: str, ours: IO[str], theirs: IO[str]) -> None:
    """Swap addresses over pipes, as workers do over Ray."""
    address = channel.address()
    if kind == "tcp":
        address["host"] = "another"
    ours.write(json.dumps(address) + "\n")
    ours.flush()
    assert select.select([theirs], [], [], WAIT_S)[0], "the other process does not answer"
    channel.connect(peer, json.loads(theirs.readline()))


def echo(kind: str) -> None:
    """Send back, doubled and transposed, whatever comes, until told to stop."""
    channel = make(kind, "b")
    meet(channel, kind, "a", sys.stdout, sys.stdin)
    step = 0
    while True:
        message = channel.recv("a", Tag(0, "F", step, 0), WAIT_S)
        if message.meta.get("stop"):
            break
        answer = [(tensor * 2).t() for tensor in message.tensors]
        channel.send("a", Tag(0, "B", step, 0), Message(answer, message.meta))
        step += 1
    channel.close()


@pytest.fixture(params=["ipc", "tcp", "torch"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    command = [sys.executable, __file__, request.param]
    channel = make(request.param, "a")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        try:
            meet(channel, request.param, "b", process.stdin, process.stdout)
            yield channel, process
        finally:
            channel.close()
            process.kill()


def ask(channel: ZmqChannel, step: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    channel.send("b", Tag(0, "F", step, 0), Message([tensor], {"step": step}))
    answer = channel.recv("b", Tag(0, "B", step, 0), WAIT_S)
    assert answer.meta == {"step": step} and torch.equal(answer.tensors[0], (tensor * 2).t())


def test_two_processes_exchange_tensors_of_changing_shape(peer: Peer) -> None:
    channel, process = peer
    shapes = [(3, 4), (1, 1), (0, 5), (7,), (1000, 1000), (2, 3)]
    for step, shape in enumerate(shapes):
        ask(channel, step, shape)
    channel.send("b", Tag(0, "F", len(shapes), 0), Message([], {"stop": True}))
    assert process.wait(WAIT_S) == 0


def test_a_killed_peer_ends_in_a_bounded_wait(peer: Peer) -> None:
    channel, process = peer
    ask(channel, 0, (3,))
    process.kill()
    process.wait(WAIT_S)
    start = time.monotonic()
    channel.send("b", Tag(0, "F", 1, 0), Message([torch.ones(1 << 20)]))  # never waits
    assert time.monotonic() - start < 1
    with pytest.raises((StallError, TransportError)):
        channel.recv("b", Tag(0, "B", 1, 0), 1.0)
    assert time.monotonic() - start < 3
    channel.close()
    assert time.monotonic() - start < 8


def test_a_frozen_peer_ends_in_a_bounded_wait_too(peer: Peer) -> None:
    channel, process = peer
    ask(channel, 0, (3,))
    process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    channel.send("b", Tag(0, "F", 1, 0), Message([torch.ones(1 << 20)]))
    with pytest.raises(StallError, match="from b"):
        channel.recv("b", Tag(0, "B", 1, 0), 1.0)
    assert time.monotonic() - start < 3
    process.send_signal(signal.SIGCONT)
    assert channel.recv("b", Tag(0, "B", 1, 0), WAIT_S).tensors[0].sum().item() == 2 << 20


if __name__ == "__main__":
    torch.set_num_threads(1)
    echo(sys.argv[1])
