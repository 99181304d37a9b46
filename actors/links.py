"""Channels between actors: which ones a worker opens, and which one each edge takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from elastic_trainer.config import Config
from elastic_trainer.transport.channel import Channel
from elastic_trainer.transport.exchange import Exchange
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import WorkerId

Channels = dict[str, Channel]
Description = Mapping[str, Any]


def open_channels(
    worker: WorkerId, config: Config, private_dir: str, device: torch.device
) -> Channels:
    """The channels of one actor, by name: ZeroMQ always, torch.distributed where configured."""
    node_ip = own_ip()
    channels: Channels = {
        "zmq": ZmqChannel(
            worker,
            private_dir=Path(private_dir),
            bind_ip=node_ip,
            encryption=config.transport.encryption == "on",
            device=device,
        )
    }
    if config.transport.channel == "torch":
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


def own_ip() -> str:
    """This node's address, as the cluster knows it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def addresses(channels: Channels) -> dict[str, Any]:
    """What peers need to connect, by channel."""
    return {name: channel.address() for name, channel in channels.items()}


def make_exchange(
    channels: Channels, device_type: str, peers: Mapping[WorkerId, Description]
) -> Exchange:
    """Connect to all peers and choose a channel per edge.

    Two workers on the same kind of device talk over torch.distributed if both have opened it (NCCL
    between CUDA devices); everything else, the loader's batches included, goes over ZeroMQ.
    """
    choose: dict[WorkerId, str] = {}
    for peer, description in peers.items():
        offered = description["addresses"]
        alike = description["device"] == device_type
        name = "torch" if alike and "torch" in offered and "torch" in channels else "zmq"
        channels[name].connect(peer, offered[name])
        choose[peer] = name
    return Exchange(channels, choose)
