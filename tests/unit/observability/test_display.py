"""What the user sees: a panel on a terminal, a line now and then in a log."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_trainer.errors import RunError
from elastic_trainer.observability.display import (
    Display,
    PlainDisplay,
    SilentDisplay,
    choose_display,
)
from elastic_trainer.observability.panel import RichDisplay
from elastic_trainer.observability.picture import draw
from elastic_trainer.observability.progress import (
    Progress,
    busy_share,
    format_count,
    format_duration,
    phase_shares,
    sparkline,
)
from elastic_trainer.observability.record import RunRecord

PLAN = {
    "generation": 1,
    "schedule": "1f1b",
    "layers": ["embed", "blocks.0", "blocks.1", "head"],
    "stages": [
        {"stage": 0, "first": 0, "stop": 3, "worker": "stage-0"},
        {"stage": 1, "first": 3, "stop": 4, "worker": "stage-1"},
    ],
    "predicted": {"step_s": 0.45},
}
STATUS = {
    "name": "my-run",
    "state": "running",
    "total_updates": 100,
    "stage_busy": [{"forward": 0.25, "backward": 0.5, "recv": 0.125}, {"forward": 0.5}],
    "eval_loss": 2.5,
    "perplexity": 12.18,
    "checkpoint_update": 10,
    "metrics_address": "127.0.0.1:9",
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def line(update: int, loss: float = 3.25) -> dict[str, Any]:
    return {
        "update": update,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": None,
        "tokens_per_s": 12345.0,
        "step_s": 0.5,
    }


def panel_text(display: RichDisplay, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(display.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_shows_everything_at_any_width(clock: Clock, width: int) -> None:
    stream = io.StringIO()
    with RichDisplay(
        Console(file=stream, force_terminal=True, width=width), clock=clock
    ) as display:
        display.status(STATUS)
        display.plan(PLAN)
        for update in range(1, 21):
            clock.now += 0.5
            display.update(line(update, loss=10 / update))
        text = panel_text(display, width)
    for shown in (
        "my-run",
        "update 20 / 100",
        "0:10",
        "ETA 0:40",
        "loss 0.5",
        "█",
        "tokens/s 12.3k",
        "step 500 ms (planned 450)",
        "grad norm –",
        "stage 0",
        "75% busy",
        "50% busy",
        "held-out loss 2.5",
        "perplexity 12.18",
        "checkpoint update 10, 0:10 ago",
        "schedule 1f1b",
        "http://127.0.0.1:9/metrics",
        "running",
    ):
        assert shown in text, f"{shown!r} is missing in\n{text}"
    assert ("embed … blocks.1" in text) or width == 60
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert "my-run" in stream.getvalue(), "the live panel was drawn"


def test_the_panel_before_anything_is_known(clock: Clock) -> None:
    display = RichDisplay(Console(file=io.StringIO(), width=80), clock=clock)
    text = panel_text(display, 80)
    assert "starting" in text and "update 0" in text and "loss –" in text and "ETA –" in text


def test_the_panel_says_why_a_run_is_not_running(clock: Clock) -> None:
    display = RichDisplay(Console(file=io.StringIO(), width=80), clock=clock)
    with display:
        display.status({"state": "stopping", "reason": "SIGINT received"})
        display.status({"warning": "checkpoint of update 3 failed: disk full"})
        text = panel_text(display, 80)
    assert "stopping" in text and "SIGINT received" in text and "disk full" in text


def test_messages_and_close_can_come_at_any_time(clock: Clock) -> None:
    stream = io.StringIO()
    display = RichDisplay(Console(file=stream, force_terminal=True, width=80), clock=clock)
    display.message("before [not markup]")
    display.status(STATUS)
    display.message("during")
    display.close()
    display.close()
    assert "before [not markup]" in stream.getvalue() and "during" in stream.getvalue()


def test_a_loss_that_is_not_of_text_has_no_perplexity(clock: Clock) -> None:
    status = STATUS | {"perplexity": None}
    stream = io.StringIO()
    with RichDisplay(Console(file=stream, force_terminal=True), clock=clock) as display:
        display.status(status)
        text = panel_text(display, 80)
    assert "held-out loss 2.5" in text and "perplexity" not in text
    progress = Progress()
    progress.see_status(status, now=0.0)
    assert progress.sentence("eval_loss") == "held-out loss 2.5"


def test_plain_lines_come_by_time_and_the_last_one_always(clock: Clock) -> None:
    stream = io.StringIO()
    with PlainDisplay(stream, every_s=5.0, clock=clock) as display:
        display.plan(PLAN)
        display.plan(PLAN)
        for update in range(1, 24):
            clock.now += 0.5
            display.status(STATUS)
            display.update(line(update))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["stage-0: embed … blocks.1", "stage-1: head"]
    told = [text for text in lines[2:] if not text.startswith("update ")]
    assert told == ["running", "held-out loss 2.5, perplexity 12.18", "checkpoint at update 10"]
    updates = [text for text in lines if text.startswith("update ")]
    assert [text.split()[1] for text in updates] == ["1/100", "11/100", "21/100", "23/100"]
    assert updates[1] == (
        "update 11/100  loss 3.25  lr 0.001  grad norm –  12.3k tokens/s  busy 75% 50%  ETA 0:44"
    )
    assert not re.search("\x1b", stream.getvalue()), "no control characters in a log"


def test_a_log_tells_a_state_once_with_its_reason(clock: Clock) -> None:
    stream = io.StringIO()
    with PlainDisplay(stream, clock=clock) as display:
        for _ in range(3):
            display.status({"state": "starting", "reason": "waiting for 2 workers"})
        display.status({"state": "failed", "reason": "NaN"})
        display.message("hello")
    assert stream.getvalue().splitlines() == [
        "starting: waiting for 2 workers",
        "failed: NaN",
        "hello",
    ]


def test_the_display_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(choose_display(True, io.StringIO()), PlainDisplay)
    assert isinstance(choose_display(True, Terminal()), RichDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_display(True, Terminal()), PlainDisplay)
    assert isinstance(choose_display(False, Terminal()), SilentDisplay)
    mine: Display = SilentDisplay()
    assert choose_display(mine) is mine


def test_progress_ignores_repeats_and_smooths() -> None:
    progress = Progress()
    progress.see_status({"total_updates": 10}, 0.0)
    progress.see_line({"update": 2, "loss": 1.0, "step_s": 1.0})
    progress.see_line({"update": 2, "loss": 9.0, "step_s": 9.0})
    progress.see_line({"update": 1, "loss": 9.0, "step_s": 9.0})
    assert list(progress.losses) == [1.0] and progress.eta_s == 8.0
    progress.see_line({"update": 3, "loss": None, "step_s": 2.0})
    assert list(progress.losses) == [1.0] and progress.step_s == pytest.approx(1.1)


def test_shares() -> None:
    shares = phase_shares({"forward": 1.0, "recv": 1.0, "backward": 2.0}, 8.0)
    assert shares == {"forward": 0.125, "recv": 0.125, "backward": 0.25}
    assert busy_share(shares) == 0.375
    assert busy_share({"busy": 0.5}) == 0.5
    assert phase_shares({"forward": 1.0}, 0.0) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("inf"), "–"),
        (0, "0"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (999600, "1.00M"),
        (123.4e6, "123M"),
        (5e13, "50000G"),
    ],
)
def test_counts(value: float | None, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (float("nan"), "–"), (0.4, "0:00"), (65, "1:05"), (7389, "2:03:09")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_sparklines() -> None:
    assert sparkline([], 10) == "" and sparkline([1.0], 0) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([1.0, float("nan"), 0.0], 10) == "█▁"
    falling = sparkline([float(1000 - index) for index in range(1000)], 8)
    assert falling == "█▇▆▅▄▃▂▁"


def test_a_picture_shows_a_run_as_it_stood(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "my-run") as record:
        with pytest.raises(RunError, match="no update to show"):
            draw(record.path)
        record.write_status({**STATUS, "state": "completed", "started_at": 100.0})
        for update in range(1, 101):
            record.append_update(line(update, loss=100 / update) | {"time": 100.0 + update})
    whole = draw(tmp_path / "my-run").replace("&#160;", " ")
    assert whole.startswith("<svg") and "update 100 / 100" in whole and "completed" in whole
    half = draw(tmp_path / "my-run", 50).replace("&#160;", " ")
    assert "update 50 / 100" in half and "0:50" in half and "running" in half
    assert "update 10, 0:40 ago" in half
    early = draw(tmp_path / "my-run", 5).replace("&#160;", " ")
    assert "checkpoint" not in early and "checkpoint" in half
