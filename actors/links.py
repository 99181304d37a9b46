"""Channels between actors: which ones a worker opens, and which one each edge takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from elastic_trainer.config import Config
from elastic_trainer.transport.channel import Channel
from elastic_trainer.transport.exchange import Exchange
from elastic_trainer.transport.inbox import BufferedChannel
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import WorkerId

if TYPE_CHECKING:  # the loader does without
    import torch

Channels = dict[str, Channel]
Description = Mapping[str, Any]


def open_channels(
    worker: WorkerId, config: Config, private_dir: str, device: "torch.device | None"
) -> Channels:
    """The channels of one actor, by name: ZeroMQ always, torch.distributed where configured.

    Args:
        device: where received tensors go; None: it only sends, and needs no torch.
    """
    node_ip = own_ip()
    channels: Channels = {
        "zmq": ZmqChannel(
            worker,
            private_dir=Path(private_dir),
            bind_ip=node_ip,
            encryption=config.transport.encryption == "on",
            device="cpu" if device is None else device,
        )
    }
    if config.transport.channel == "torch" and device is not None:
        from elastic_trainer.transport.torch_channel import TorchChannel

        channels["torch"] = TorchChannel(
            worker,
            private_dir=Path(private_dir),
            bind_ip=node_ip,
            encryption=config.transport.encryption == "on",
            device=device,
            timeout_s=config.elastic.stall_limit_s,
        )
    return channels


def open_state_channel(worker: WorkerId, config: Config, private_dir: str) -> BufferedChannel:
    """The channel on which a worker gives layer states away and takes copies in."""
    return ZmqChannel(
        worker,
        private_dir=Path(private_dir),
        bind_ip=own_ip(),
        encryption=config.transport.encryption == "on",
    )


def own_ip() -> str:
    """This node's address, as the cluster knows it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def addresses(channels: Channels) -> dict[str, Any]:
    """What peers need to connect, by channel."""
    return {name: channel.address() for name, channel in channels.items()}


class Edges:
    """The edges between one actor and its peers; connections to peers that stay are kept.

    Two workers on the same kind of device talk over torch.distributed if both have opened it (NCCL
    between CUDA devices); everything else, the loader's batches included, goes over ZeroMQ.
    """

    def __init__(self, channels: Channels, device_type: str) -> None:
        self._channels = channels
        self._device_type = device_type
        self._choice: dict[WorkerId, str] = {}
        self.exchange = Exchange(channels, {})

    def connect(self, peers: Mapping[WorkerId, Description]) -> None:
        """Be connected to these peers, and to nobody else."""
        choice = {peer: self._choose(description) for peer, description in peers.items()}
        for peer, name in self._choice.items():
            if choice.get(peer) != name:
                self._channels[name].disconnect(peer)
        self._choice = choice
        for peer, name in choice.items():
            self._channels[name].connect(peer, peers[peer]["addresses"][name])
        self.exchange.choose(choice)

    def _choose(self, description: Description) -> str:
        alike = description["device"] == self._device_type
        both = "torch" in description["addresses"] and "torch" in self._channels
        return "torch" if alike and both else "zmq"
