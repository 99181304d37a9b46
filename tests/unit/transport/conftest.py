"""Pairs of connected channels of every kind."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_trainer.transport.channel import Channel
from elastic_trainer.transport.in_process import InProcessNetwork
from elastic_trainer.transport.torch_channel import TorchChannel
from elastic_trainer.transport.zmq_channel import ZmqChannel

KINDS = ("in_process", "zmq_ipc", "zmq_tcp", "zmq_plain", "torch")
WAIT_S = 20.0

Pair = tuple[Channel, Channel]


def make_pair(kind: str) -> Pair:
    """Channels of workers "a" and "b", connected both ways."""
    if kind == "in_process":
        network = InProcessNetwork()
        return network.channel("a"), network.channel("b")
    pair: Pair
    if kind == "torch":
        pair = TorchChannel("a", timeout_s=WAIT_S), TorchChannel("b", timeout_s=WAIT_S)
    else:
        encryption = kind != "zmq_plain"
        pair = ZmqChannel("a", encryption=encryption), ZmqChannel("b", encryption=encryption)
    link(*pair, tcp=kind in ("zmq_tcp", "zmq_plain"))
    return pair


def link(first: Channel, second: Channel, tcp: bool) -> None:
    """Connect both ways; tcp=True makes them believe that they live on different hosts."""
    for one, other, name in ((first, second, "b"), (second, first, "a")):
        address = other.address()
        if tcp:
            address["host"] = "another"
        one.connect(name, address)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def connected() -> Callable[[str], Pair]:
    return make_pair


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    channels = make_pair(kind)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def zmq_pair() -> Iterator[tuple[ZmqChannel, ZmqChannel]]:
    a, b = make_pair("zmq_tcp")
    assert isinstance(a, ZmqChannel) and isinstance(b, ZmqChannel)
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets; pytest's own may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
