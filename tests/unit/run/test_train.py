"""The last words of a run, and detached runs that do not begin."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_trainer.config import Config, to_yaml
from elastic_trainer.errors import RunError
from elastic_trainer.run import train
from elastic_trainer.run.launch import INTERRUPTED
from elastic_trainer.run.prepare import Launch
from elastic_trainer.types import Cursor, RunResult

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
print(os.getpid(), flush=True)
time.sleep(300)
"""


def result(folder: Path, **facts: Any) -> RunResult:
    (folder / "config.yaml").write_text(to_yaml(Config()))
    known = {"status": "stopped", "reason": INTERRUPTED, "checkpoint": "c"}
    return RunResult(name="r", run_dir=str(folder), update=3, **(known | facts))


@pytest.mark.parametrize(
    ("facts", "code", "speaks"),
    [
        ({}, 130, False),
        ({"reason": "SIGINT received"}, 0, True),
        ({"reason": "", "status": "completed"}, 0, True),
        ({"reason": "", "status": "completed", "checkpoint": None}, 0, False),
    ],
)
def test_who_interrupts_twice_gets_no_text_and_code_130(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    facts: dict[str, Any],
    code: int,
    speaks: bool,
) -> None:
    ended = result(tmp_path, **facts)
    said: list[str] = []
    monkeypatch.setattr(train, "fit", lambda *_, **__: ended)

    def speak(*_: Any) -> bool:
        said.append("sample")
        return True

    monkeypatch.setattr(train, "_show_sample", speak)
    assert train.train_command(None, []) == code
    assert said == ["sample"] * speaks
    assert "at update 3" in capsys.readouterr().out


def test_a_loss_that_is_not_of_text_is_told_without_perplexity(tmp_path: Path) -> None:
    out = io.StringIO()
    ended = result(tmp_path, eval_loss=1.25, checkpoint=None)
    train.show_result(Console(file=out), ended)
    assert "held-out loss 1.2500\n" in out.getvalue()


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(
        config=Config(), name="r", run_dir=tmp_path / "run", update=0, cursor=Cursor(),
        checkpoint=None, num_layers=None, notes=(),
    )  # fmt: skip


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Instead of a trainer, a process that ignores SIGTERM and has a child."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(_: Any, **options: Any) -> "subprocess.Popen[bytes]":
        child = popen([sys.executable, "-c", STUBBORN], **options)
        started.append(child)
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(train, "END_S", 0.2)
    yield started
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("how", ["given up", "interrupted"])
def test_a_detached_run_that_does_not_begin_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
    launch: Launch,
    children: list["subprocess.Popen[bytes]"],
    how: str,
) -> None:
    log = launch.run_dir / "trainer.log"
    monkeypatch.setattr(train, "DETACH_S", 0.0)

    def look(_: Path) -> bool:
        """The time is over, or Ctrl-C is pressed, once the child and its child run."""
        deadline = time.monotonic() + 30.0
        while log.read_text().count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if how == "interrupted":
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(train, "is_run", look)
    with pytest.raises(RunError if how == "given up" else KeyboardInterrupt):
        train._detach(Console(file=io.StringIO()), launch, ["train"], False)
    pids = [int(text) for text in log.read_text().split()]
    assert children[0].wait(30.0) == -signal.SIGKILL and children[0].pid in pids
    deadline = time.monotonic() + 30.0
    while any(map(runs, pids)):  # the kernel, on a busy machine, takes its time
        assert time.monotonic() < deadline
        time.sleep(0.01)
