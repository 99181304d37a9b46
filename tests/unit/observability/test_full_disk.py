"""A run's record while the disk is full: nothing is raised, nothing is lost, order is kept."""

from pathlib import Path

import pytest

from elastic_trainer.observability import record as module
from elastic_trainer.observability.lines import Journal, complete_lines
from elastic_trainer.observability.record import RunRecord, read_json, write_atomically

FULL = Path("/dev/full")  # every write fails as on a full disk
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@needs_full
def test_lines_wait_for_room(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    journal = Journal(path)
    journal.append({"update": 1})
    path.rename(tmp_path / "kept")
    path.symlink_to(FULL)
    journal.append({"update": 2})
    journal.append({"update": 3})
    path.unlink()
    (tmp_path / "kept").rename(path)
    journal.append({"update": 4})
    assert [line["update"] for line in complete_lines(path)] == [1, 2, 3, 4]


@needs_full
def test_lines_that_wait_go_when_their_updates_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    journal = Journal(path)
    journal.append({"update": 1})
    path.rename(tmp_path / "kept")
    path.symlink_to(FULL)
    for update in (2, 3, 4):
        journal.append({"update": update})
    path.unlink()
    (tmp_path / "kept").rename(path)
    journal.truncate_after(2)
    journal.append({"update": 3, "again": True})
    lines = complete_lines(path)
    assert [line["update"] for line in lines] == [1, 2, 3] and lines[2]["again"]


def test_a_line_whose_end_waits_for_room_is_kept_or_goes_whole(tmp_path: Path) -> None:
    for kept, want in ((1, [1]), (2, [1, 2])):
        path = tmp_path / f"{kept}.jsonl"
        journal = Journal(path)
        journal.append({"update": 1})
        with open(path, "ab") as file:
            file.write(b'{"upd')
        journal._waiting = b'ate": 2}\n'
        journal.truncate_after(kept)
        journal.append({"update": want[-1] + 1})
        assert [line["update"] for line in complete_lines(path)] == [*want, want[-1] + 1]


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "nowhere" / "lines.jsonl").append({})


@needs_full
def test_the_status_keeps_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        FULL.write_text(text)

    with RunRecord(tmp_path / "run") as record:
        record.write_status({"state": "running", "update": 1})
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_atomically", full)
            record.write_status({"checkpoint": "here", "update": 2})
        assert read_json(record.path / "status.json")["update"] == 1
        record.write_status({"loss": 1.0})
        status = read_json(record.path / "status.json")
    assert (status["state"], status["update"], status["checkpoint"]) == ("running", 2, "here")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_atomically(target, "text")  # a folder cannot be replaced by a file
    assert list(tmp_path.iterdir()) == [target]
