"""Following a file of lines that grows, and is cut back when updates are done again."""

from pathlib import Path

from elastic_trainer.observability.lines import Follower
from elastic_trainer.observability.record import METRICS_FILE, RunRecord


def test_a_file_that_is_cut_back_and_grows_again(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with RunRecord(tmp_path / "run") as record:
        follower = Follower(record.path / METRICS_FILE)
        assert follower.look() == (False, [])

        def updates() -> list[tuple[int, int]]:
            anew, lines = follower.look()
            if anew:
                seen.clear()
            seen.extend((line["update"], line["generation"]) for line in lines)
            return seen

        for update in range(1, 6):
            record.append_update({"update": update, "generation": 1})
        assert updates() == [(u, 1) for u in range(1, 6)]
        record.truncate_after(3)
        record.append_update({"update": 4, "generation": 2})
        assert updates() == [(1, 1), (2, 1), (3, 1), (4, 2)]
        record.truncate_after(2)
        for update in range(3, 9):  # longer than before at once
            record.append_update({"update": update, "generation": 3})
        assert updates() == [(1, 1), (2, 1), *((u, 3) for u in range(3, 9))]
        assert follower.look() == (False, [])
        record.truncate_after(0)
        assert follower.look() == (True, [])


def test_a_line_that_is_being_written(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    follower = Follower(file)
    file.write_text('{"a": 1}\n{"a"')
    assert follower.look() == (False, [{"a": 1}])
    assert follower.look() == (False, [])
    with file.open("a") as more:
        more.write(": 2}\n")
    assert follower.look() == (False, [{"a": 2}])
