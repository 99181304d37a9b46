"""`chaos`: what it reads, what it refuses before anything happens, what it prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli.main import run
from elastic_trainer.observability.record import RunRecord
from elastic_trainer.testing.chaos import trial
from elastic_trainer.testing.chaos.verdict import Row, Verdict

GOOD = Row(
    text="kill stage=1@update=30",
    workers=("stage-1",),
    found="stage-1 crashed",
    recovery_s=1.234,
    problem="",
)
BAD = Row(
    text="hang stage=0", workers=("stage-0",), found="", recovery_s=None, problem="nobody saw it"
)


def verdict(*rows: Row, problems: tuple[str, ...] = ()) -> Verdict:
    return Verdict(rows=rows, state="running", update=47, num_audited=40, problems=problems)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run, and what the trial is asked for; it answers `verdict`."""
    monkeypatch.chdir(tmp_path)
    with RunRecord(tmp_path / "runs" / "mine") as record:
        record.write_status({"state": "running"})
    asked: dict[str, Any] = {"verdict": verdict(GOOD)}

    def try_run(run: Path, steps: Any = (), *, tell: Callable[[str], None], **rest: Any) -> Verdict:
        asked.update(rest, run=run, steps=steps)
        tell("now")
        answer: Verdict = asked["verdict"]
        return answer

    monkeypatch.setattr(trial, "try_run", try_run)
    return asked


def test_events_from_options_and_a_script(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.day").write_text("# one\nslow stage=0 factor=2 @time=5\n")
    arguments = ["--kill", "stage=1@update=30", "--kill", "stage=any", "--scale", "2:4@update=9"]
    arguments += ["--hang", "stage=0", "--stop", "stage=2", "--drain", "node=10.0.0.1"]
    code = run(["chaos", "mine", *arguments, "--script", "bad.day", "--seed", "7", "--limit", "9"])
    assert code == 0
    assert [step.text for step in asked["steps"]] == [
        "kill stage=1@update=30",
        "kill stage=any",
        "hang stage=0",
        "stop stage=2",
        "drain node=10.0.0.1",
        "scale 2:4@update=9",
        "slow stage=0 factor=2 @time=5",
    ]
    assert asked["run"] == Path("runs/mine").absolute()
    assert (asked["seed"], asked["limit_s"], list(asked["trace"])) == (7, 9.0, [])
    printed = capsys.readouterr()
    assert printed.err == "now\n"
    head, row, end = printed.out.splitlines()
    assert head.split() == ["event", "worker", "found", "went", "on", "after", "verdict"]
    assert "stage-1 crashed" in row and "1.23 s" in row and row.endswith("passed")
    assert end == "PASSED: running at update 47, samples of 40 updates compared"


def test_a_trace(asked: dict[str, Any]) -> None:
    Path("spot.csv").write_text("0,add,a\n60000,remove,a\n")
    assert run(["chaos", "mine", "--trace", "spot.csv", "--speedup", "60"]) == 0
    assert [change.at_s for change in asked["trace"]] == [0.0, 60.0] and asked["speedup"] == 60


def test_a_run_that_did_not_take_it_well(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked["verdict"] = verdict(GOOD, BAD, problems=("the samples are wrong",))
    assert run(["chaos", "mine", "--kill", "stage=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("nobody saw it")
    assert lines[3] == "- the samples are wrong" and lines[4].startswith("FAILED: running")


def test_json(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["verdict"] = verdict(GOOD, BAD)
    assert run(["chaos", "mine", "--kill", "stage=1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is False and [row["passed"] for row in told["rows"]] == [True, False]
    assert told["rows"][0]["recovery_s"] == 1.234 and told["update"] == 47


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        ([], "nothing is to happen. Give --kill, --script, --trace or another.", 2),
        (["--kill", "stage=x"], "--kill stage=x: `stage=x` cannot be read. Write stage=1.", 2),
        (["--drain", "stage=1 stage=2"], "--drain stage=1 stage=2: drain what?", 2),
        (["--scale", "0"], "--scale 0: `--workers` is '0'. A run needs at least one worker.", 2),
        (["--script", "wrong"], "wrong, line 2: `bang` is no event", 2),
        (["--script", "none"], "cannot read none: No such file or directory", 2),
        (["--trace", "wrong"], "wrong, line 1: `kill stage=0` has not three columns", 2),
        (["--script", "bytes"], "cannot read bytes: it is not UTF-8", 2),
    ],
)
def test_wrong_events_are_refused_in_one_line(
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
    code: int,
) -> None:
    Path("wrong").write_text("kill stage=0\nbang\n")
    Path("bytes").write_bytes(b"\xff\xfe")
    assert run(["chaos", "mine", *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic-trainer: {said}") and "run" not in asked


@pytest.mark.parametrize("name", ["other", "ended"])
def test_no_such_run_or_one_that_has_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunRecord(tmp_path / "runs" / "ended") as record:
        record.write_status({"state": "completed"})
    assert run(["chaos", name, "--kill", "stage=1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    said = "There is no run `other`" if name == "other" else "ended is not running: completed"
    assert said in line
