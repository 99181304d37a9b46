"""The worker that is named is the one that a fault was put on, wherever and however it stops.

The whole coordinator judges, over workers that stand where the schedule lets them come; those that
wait in vain complain, and nobody says who is to blame.
"""

import random
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from elastic_trainer.actors import coordinator as module
from elastic_trainer.actors.coordinator import Coordinator
from elastic_trainer.config import Config, load_config
from elastic_trainer.elastic.events import Cause
from elastic_trainer.observability.runs import read_membership, read_updates
from elastic_trainer.testing.stuck_site import How, Stop, StuckSite
from elastic_trainer.types import Cursor

pytestmark = pytest.mark.timeout(600)

LAYERS = [f"layer{i}" for i in range(6)]
UPDATES = 12
STALL_S, LEASE_S = 1.0, 0.5
CAUSES = {How.KILLED: Cause.CRASHED, How.FROZEN: Cause.LEASE_EXPIRED, How.HUNG: Cause.WEDGED}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "yield_to_compute", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(num_workers: int, schedule: str, microbatches: int) -> Config:
    size = 1 if schedule == "async_1f1b" else 2
    return load_config(
        {
            "model": {"name": "emulated", "args": {"num_layers": len(LAYERS)}},
            "data": {"format": "synthetic"},
            "train": {
                "max_steps": UPDATES,
                "eval_batches": 0,
                "global_batch_size": size * microbatches,
                "max_grad_norm": 1.0 if size > 1 else 0.0,
            },
            "pipeline": {
                "schedule": schedule,
                "microbatch_size": size,
                "segment_updates": 3,
                "commit_every": 6 if size == 1 else 0,
            },
            "metrics": {"enabled": False},
            "cluster": {"num_workers": num_workers, "start_timeout_s": 5.0},
            "elastic": {"stall_limit_s": STALL_S, "lease_limit_s": LEASE_S, "snapshot_every": 1},
        }
    )


def accused(folder: Path, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]], str]:
    """Who was named for what in the run with this seed, who should have been, and the place."""
    drawn = random.Random(seed)
    how = list(How)[seed % len(How)]
    schedule = drawn.choice(["gpipe", "1f1b", "async_1f1b"])
    num_workers, microbatches = drawn.randint(2, 5), drawn.randint(1, 4)
    site = StuckSite(
        str(folder),
        LAYERS,
        places=num_workers,
        num_microbatches=1 if schedule == "async_1f1b" else microbatches,
        stop=Stop(how=how, update=drawn.randint(1, UPDATES - 2), seed=seed),
        stall_s=STALL_S,
    )
    given = {"update": 0, "cursor": Cursor(), "checkpoint": None, "launch": "x", "num_layers": None}
    settings = config(num_workers, schedule, microbatches)
    run_dir = folder / "run"
    result = Coordinator("run", settings, str(run_dir), given, site=site, wait=site.wait).run()
    place = f"seed {seed}: {how}, {schedule}, {site.place}: {result.reason}"
    assert (result.status, result.update) == ("completed", UPDATES), place
    assert [line["update"] for line in read_updates(run_dir)] == list(range(1, UPDATES + 1))
    assert site.guilty is not None, place
    changes = [c for c in read_membership(run_dir) if c["cause"] != "start"]
    return [(c["cause"], c["worker"]) for c in changes], [(CAUSES[how], site.guilty)], place


def mistakes(folder: Path, seeds: Iterable[int]) -> list[str]:
    """What was said in runs of which the wrong worker, or one too many, was named."""
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=folder) as each:
            named, guilty, place = accused(Path(each), seed)
        if named != guilty:
            found.append(f"{place}: {named}, not {guilty}")
    return found


def test_the_guilty_one_is_named(tmp_path: Path) -> None:
    assert mistakes(tmp_path, range(6)) == []


@pytest.mark.soak
def test_the_guilty_one_is_named_in_99_of_100_runs(tmp_path: Path) -> None:
    found = mistakes(tmp_path, range(1000, 1100))
    assert len(found) <= 1, "\n".join(found)
