"""Which channels an actor opens, and with what."""

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.actors import links
from elastic_trainer.config import load_config
from elastic_trainer.transport import torch_channel


def test_every_channel_gets_the_settings_that_concern_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(links, "own_ip", lambda: "10.0.0.7")
    monkeypatch.setattr(links, "ZmqChannel", lambda worker, **given: (worker, given))
    monkeypatch.setattr(torch_channel, "TorchChannel", lambda worker, **given: (worker, given))
    changes = [
        "transport.channel=torch",
        "transport.encryption=off",
        "elastic.stall_limit_s=7",
        "train.max_steps=1",
    ]
    device = torch.device("cpu")
    channels: dict[str, Any] = dict(
        links.open_channels("stage-0", load_config(None, changes), str(tmp_path), device)
    )
    given = {
        "private_dir": tmp_path,
        "bind_ip": "10.0.0.7",
        "encryption": False,
        "device": device,
    }
    assert channels["zmq"] == ("stage-0", given)
    assert channels["torch"] == ("stage-0", given | {"timeout_s": 7.0})
