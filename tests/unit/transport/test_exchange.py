"""One object for all edges of a worker."""

import pytest
import torch

from elastic_trainer.errors import FencedError, TransportError, WorkerLostError
from elastic_trainer.transport.channel import Channel, Message, Tag
from elastic_trainer.transport.exchange import Exchange
from elastic_trainer.transport.in_process import InProcessNetwork

TAG = Tag(0, "F", 1, 0)


def two_networks() -> tuple[dict[str, dict[str, Channel]], dict[str, InProcessNetwork]]:
    networks = {"fast": InProcessNetwork(), "safe": InProcessNetwork()}
    workers: dict[str, dict[str, Channel]] = {
        worker: {name: network.channel(worker) for name, network in networks.items()}
        for worker in "abc"
    }
    return workers, networks


def test_each_edge_takes_its_channel() -> None:
    channels, _ = two_networks()
    a = Exchange(channels["a"], {"b": "fast", "c": "safe"})
    b, c = Exchange(channels["b"], {"a": "fast"}), Exchange(channels["c"], {"a": "safe"})
    for peer, exchange in (("b", b), ("c", c)):
        a.connect(peer, exchange.addresses())
        assert not exchange.has("a", TAG)
        a.send(peer, TAG, Message([torch.ones(2)]))
        assert exchange.has("a", TAG)
        assert exchange.recv("a", TAG, 10).tensors[0].tolist() == [1, 1]
        exchange.send("a", TAG, Message([torch.ones(3)]))
        assert a.recv(peer, TAG, 10).tensors[0].numel() == 3
    assert channels["a"]["fast"].bytes_sent == channels["a"]["safe"].bytes_sent == 8
    assert a.bytes_sent == 16 and a.bytes_received == 24


def test_generation_and_interruption_reach_every_channel() -> None:
    channels, _ = two_networks()
    a = Exchange(channels["a"], {"b": "fast", "c": "safe"})
    a.interrupt(WorkerLostError("b died"))
    for peer in "bc":
        with pytest.raises(WorkerLostError):
            a.recv(peer, TAG, 10)
    a.advance(1)
    for peer in "bc":
        with pytest.raises(FencedError):
            a.send(peer, TAG, Message([]))
    a.close()
    for channel in channels["a"].values():
        with pytest.raises(TransportError, match="closed"):
            channel.recv("b", Tag(1, "F", 1, 0), 10)


def test_wrong_choices_are_refused() -> None:
    channels, _ = two_networks()
    with pytest.raises(TransportError, match=r"no channel slow on this worker. it has fast, safe"):
        Exchange(channels["a"], {"b": "slow"})
    a = Exchange(channels["a"], {"b": "fast"})
    with pytest.raises(TransportError, match="no channel was chosen for c"):
        a.send("c", TAG, Message([]))
    with pytest.raises(TransportError, match="b has no channel fast"):
        a.connect("b", {"safe": {}})
    a.choose({"c": "safe"})
    a.send("c", TAG, Message([torch.ones(1)]))
    with pytest.raises(TransportError, match="no channel was chosen for b"):
        a.disconnect("b")
