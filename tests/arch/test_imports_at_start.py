"""What a user waits for: programs that start, feed or control runs load no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; sys.modules['torch'] = None; import {}"


@pytest.mark.parametrize(
    "module",
    [
        "elastic_trainer.cli",
        "elastic_trainer.run",
        "elastic_trainer.actors.coordinator",
        "elastic_trainer.actors.loader",
    ],
)
def test_torch_is_not_loaded(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


LOADER = """
import sys; sys.modules['torch'] = None
from elastic_trainer.actors import links, loader
from elastic_trainer.config import load_config
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import Cursor

links.own_ip = lambda: "127.0.0.1"
changes = ["data.format=synthetic", "train.max_steps=1", "transport.channel=torch"]
peer = ZmqChannel("stage-0")
served = loader.Loader("loader-0", load_config(None, changes), sys.argv[1])
stage = {"device": "cpu", "addresses": {"zmq": peer.address(), "torch": {}}}
served.configure(1, {"stage-0": stage}, {"input_ids": ["stage-0"]}, Cursor(), 1)
assert served.sample() and len(served.prepare(1, 1, 2)) == 2
assert served._edges.exchange.bytes_sent > 0
served.close(), peer.close()
"""


def test_the_loader_serves_batches_without_torch(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "et")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
