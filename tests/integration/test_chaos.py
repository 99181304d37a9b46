"""`elastic-trainer chaos` on a real run: each kind of event, and a verdict that can fail."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.observability.runs import read_membership, read_status
from elastic_trainer.testing.processes import (
    CLI,
    LIMIT_S,
    Cluster,
    config_file,
    has_updates,
    run_cli,
    tiny_run,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

CHAOS_S = 1500.0
TRACE = Path(__file__).parents[1] / "data" / "aws-p3-spot.csv"
SCRIPT = """
kill  stage=1 action=B        @update=+40
slow  stage=0 factor=3        @update=+80..90
gil   stage=0 seconds=0.5     @update=+100
scale 2:2                     @update=+130
stop  stage=any               @update=+180
scale 2:3                     @update=+220
kill  stage=any               @time=1
"""


@pytest.fixture
def run_dir(
    cluster: Cluster, cli_env: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A run of two workers or more that trains until the test is over."""
    layers = {"num_layers": 6, "forward_s": 0.002, "backward_s": 0.004, "activation_bytes": 64}
    # These tests share two cores with others: a worker that misses its turn is not lost.
    elastic = {"lease_limit_s": 10.0, "max_failures": -1}
    settings = tiny_run(model={"name": "emulated", "args": layers}, elastic=elastic)
    config = config_file(tmp_path, settings)
    folder = tmp_path / "run"
    workers = getattr(request, "param", "2:3")
    arguments = ["train", config, "--workers", workers, "--run-dir", str(folder)]
    with (tmp_path / "train.log").open("wb") as log:
        trainer = subprocess.Popen(
            [str(CLI), *arguments], env=cli_env, cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        wait_for(has_updates(folder, 5), "five updates")
        yield folder
        trainer.terminate()
        code = trainer.wait(LIMIT_S)
        assert code == 0, (tmp_path / "train.log").read_text()
    finally:
        if trainer.poll() is None:
            trainer.kill()
            trainer.wait(LIMIT_S)


def chaos(run_dir: Path, env: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, verdict and what was told."""
    done = run_cli(
        ["chaos", str(run_dir), "--json", *arguments], env, run_dir.parent, timeout_s=CHAOS_S
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_two_events(run_dir: Path, cli_env: dict[str, str]) -> None:
    script = run_dir.parent / "two.events"
    script.write_text("kill stage=1 action=B @update=+20\nscale 2:2 @update=+60\n")
    code, verdict, told = chaos(run_dir, cli_env, "--script", str(script), "--limit", "30")
    assert code == 0 and verdict["passed"], f"{json.dumps(verdict, indent=1)}\n{told}"
    killed, _scaled = verdict["rows"]
    assert killed["found"].endswith("crashed") and killed["recovery_s"] < 30
    assert verdict["num_audited"] > 60
    assert killed["workers"][0] in {c["worker"] for c in read_membership(run_dir)}

    code, verdict, _ = chaos(run_dir, cli_env, "--kill", "stage=0", "--limit", "0.001")
    assert code == 1 and not verdict["passed"]
    assert "more than 0.001 s" in verdict["rows"][0]["problem"]

    update = read_status(run_dir)["update"]
    refused = run_cli(
        ["chaos", str(run_dir), "--kill", "stage=0@update=3"], cli_env, run_dir.parent
    )
    assert refused.returncode == 2 and update > 3
    assert "the run is at update" in refused.stderr


@pytest.mark.soak
def test_a_bad_day(run_dir: Path, cli_env: dict[str, str]) -> None:
    script = run_dir.parent / "bad.day"
    script.write_text(SCRIPT)
    code, verdict, told = chaos(
        run_dir, cli_env, "--script", str(script), "--seed", "3", "--limit", "30"
    )
    assert code == 0 and verdict["passed"], f"{json.dumps(verdict, indent=1)}\n{told}"
    rows = {row["text"].split("@")[0].strip(): row for row in verdict["rows"]}
    assert rows["kill  stage=1 action=B"]["found"].endswith("crashed")
    assert rows["stop  stage=any"]["found"].endswith("lease expired")
    assert rows["kill  stage=any"]["found"].endswith("crashed")
    assert [row["recovery_s"] < 30 for row in verdict["rows"]] == [True] * 7
    assert verdict["num_audited"] > 180
    guilty = {c["worker"] for c in read_membership(run_dir) if c["cause"] != "start"}
    assert guilty >= {worker for name in rows for worker in rows[name]["workers"] if "l  s" in name}


@pytest.mark.soak
@pytest.mark.timeout(2 * CHAOS_S)
@pytest.mark.parametrize("run_dir", ["2:6"], indirect=True)
def test_a_recorded_history_of_spot_instances(run_dir: Path, cli_env: dict[str, str]) -> None:
    """Eleven hours in eleven minutes: some thirty workers go without notice, as many come."""
    arguments = ["--trace", str(TRACE), "--speedup", "60", "--limit", "120"]
    code, verdict, told = chaos(run_dir, cli_env, *arguments)
    assert code == 0, f"{json.dumps(verdict, indent=1)}\n{told}"
    kills = [row for row in verdict["rows"] if row["text"].startswith("kill")]
    assert len(kills) > 25 and all(row["found"].endswith("crashed") for row in kills)
