"""A trainer killed while it saves goes on from its newest complete checkpoint."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.observability.runs import read_status
from elastic_trainer.run import checkpoints
from elastic_trainer.testing.runs import run_config, saved_state, synchronous_reference
from elastic_trainer.testing.toys import assert_same_states

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

NUM_UPDATES = 60
SETTINGS = (
    "data.format=synthetic",
    "data.sequence_length=16",
    "model.name=gpt",
    "model.args={vocab_size: 64, num_layers: 4, dim: 64, num_heads: 2, dropout: 0.1}",
    "train.global_batch_size=4",
    f"train.max_steps={NUM_UPDATES}",
    "train.eval_batches=0",
    "pipeline.microbatch_size=2",
    "pipeline.segment_updates=1",
    "checkpoint.every_steps=1",
    "checkpoint.num_to_keep=3",
)
DEADLINE_S = 120.0


class Trainer:
    """`elastic-trainer train` in a process of its own, and the actors that work for it."""

    def __init__(self, run_dir: Path, address: str, env: dict[str, str], log: Path) -> None:
        self.run_dir, self.log = run_dir, log
        command = [sys.executable, "-m", "elastic_trainer.cli", "train", *SETTINGS]
        command += ["--address", address, "--run-dir", str(run_dir), "--resume", "auto"]
        self._begun = time.time()
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def processes(self) -> list[int]:
        """Driver, coordinator and stages, as the run folder names them."""
        text = (self.run_dir / "events.jsonl").read_text()
        events = [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
        stages = [e["pid"] for e in events if e["kind"] == "worker" and e["time"] > self._begun]
        return [self.process.pid, int(read_status(self.run_dir)["pid"]), *stages]

    def kill_in_a_save(self, after: int) -> None:
        """Kill all of it between the first byte of a checkpoint and its manifest.

        The processes are frozen first, which shows for certain that the save was not over.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            if incomplete(self.run_dir, after):
                with frozen(self.processes()) as pids:
                    if incomplete(self.run_dir, after):
                        for pid in pids:
                            os.kill(pid, signal.SIGKILL)
                        break
            time.sleep(0.002)  # a busy loop would take a core from the trainer
        self.process.wait(DEADLINE_S)
        while read_status(self.run_dir)["alive"]:
            assert time.monotonic() < deadline, "the run's lock outlived its trainer"
            time.sleep(0.02)

    def finish(self) -> str:
        """Wait for its end; gives what it printed."""
        self.process.wait(DEADLINE_S)
        text = self.log.read_text()
        assert self.process.returncode == 0, text
        return text


@contextmanager
def frozen(pids: Sequence[int]) -> Iterator[Sequence[int]]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # killed meanwhile


def steps(run_dir: Path) -> list[tuple[int, Path]]:
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((int(folder.name.removeprefix("step-")), folder) for folder in folders)


def incomplete(run_dir: Path, after: int) -> bool:
    """Whether the newest checkpoint, of an update behind `after`, has files but no manifest."""
    found = steps(run_dir)
    if not found or found[-1][0] <= after:
        return False
    folder = found[-1][1]
    return any(folder.glob("layer-*")) and not (folder / "manifest.json").exists()


def newest_complete(run_dir: Path) -> int:
    """By the files alone."""
    complete = []
    for update, folder in steps(run_dir):
        try:
            manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        except (OSError, ValueError):
            continue
        assert all((folder / layer["file"]).exists() for layer in manifest["layers"])
        complete.append(update)
    return max(complete)


def resumed_from(log: str) -> list[int]:
    return [int(number) for number in re.findall(r"resuming from update (\d+)", log)]


@pytest.mark.soak
def test_killed_twice_while_saving(
    ray_address: str, cli_env: dict[str, str], tmp_path: Path
) -> None:
    """The end is that of an undisturbed run, and each start says where it goes on from."""
    run_dir, moments = tmp_path / "run", random.Random(20)
    points: list[int] = []
    for attempt, share in enumerate((0.1, 0.5)):
        after = int(NUM_UPDATES * share) + moments.randrange(10)
        trainer = Trainer(run_dir, ray_address, cli_env, tmp_path / f"{attempt}.log")
        trainer.kill_in_a_save(after)
        assert resumed_from(trainer.log.read_text()) == points[-1:]
        points.append(newest_complete(run_dir))
        assert max(update for update, _ in steps(run_dir)) > points[-1]
        assert max(info.update for info in checkpoints(run_dir)) == points[-1]

    text = Trainer(run_dir, ray_address, cli_env, tmp_path / "last.log").finish()
    assert resumed_from(text) == points[-1:]
    manifest, state = saved_state(run_dir)
    assert manifest.update == NUM_UPDATES
    oracle = synchronous_reference(run_config(run_dir), NUM_UPDATES)
    assert_same_states(state, oracle.layer_states())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, NUM_UPDATES + 1))
    assert [line["loss"] for line in lines] == oracle.losses
    assert len(steps(run_dir)) == 3, "the remains of the cut-off saves are still there"
