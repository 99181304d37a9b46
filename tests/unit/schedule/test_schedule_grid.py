"""The picture of a schedule."""

from elastic_trainer.schedule.build import build
from elastic_trainer.schedule.grid import MARK, format_grid


def test_a_whole_schedule_with_the_place_marked() -> None:
    assert format_grid(build("1f1b", 2, [1]), error=(1, 2)).splitlines() == [
        "   stage 0   stage 1",
        "0  0F0       1RECV_F0",
        "1  0SEND_F0  1F0",
        "2  0RECV_B0  1B0 <-- HERE",
        "3  0B0       1SEND_B0",
        "4  0OPT0     1OPT0",
    ]


def test_with_progress_the_row_now_shows_what_everybody_was_at() -> None:
    lines = format_grid(build("1f1b", 2, [1]), progress=[2, 5], error=(0, 2)).splitlines()
    assert lines[0] == "     stage 0            stage 1"
    now = next(line for line in lines if line.startswith("now"))
    assert now == "now  0RECV_B0 <-- HERE  (end)"
    assert lines[lines.index(now) - 1] == " -1  0SEND_F0           1OPT0"
    assert lines[lines.index(now) + 1] == " +1  0B0"


def test_a_place_behind_the_end_is_marked() -> None:
    lines = format_grid(build("1f1b", 2, [1]), error=(0, 5)).splitlines()
    assert lines[-1] == "5  (end) <-- HERE  (end)"


def test_a_long_schedule_shows_only_the_neighbourhood() -> None:
    lists = build("async_1f1b", 2, [1] * 500)
    for progress in (None, [1000, 990]):
        text = format_grid(lists, progress, (0, 1000))
        assert text.count(MARK) == 1
        assert f"{lists[0][1000]} {MARK}" in text
        assert len(text.splitlines()) == 14
    assert len(format_grid(lists).splitlines()) < 50


def test_a_long_schedule_marks_a_place_behind_a_short_list() -> None:
    lists = build("async_1f1b", 2, [1] * 500)
    cut = (lists[0], lists[1][:100])
    assert f"(end) {MARK}" in format_grid(cut, error=(1, 100))
    assert f"(end) {MARK}" in format_grid((lists[0],), error=(0, len(lists[0])))
