"""What a coordinator must know to take the place of one that died: a file in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.observability.lines import dump_json, full_disk_tolerated
from elastic_trainer.observability.record import read_json, write_atomically
from elastic_trainer.types import Plan, Prediction, RunResult, StagePlan

JOURNAL_FILE = "journal.json"


class RunJournal:
    """The file, replaced atomically.

    It is bound to one launch of the trainer: a run that is resumed by another one starts from its
    checkpoint, and finds no workers.

    Args:
        run_dir: folder of the run.
        launch: tells the trainers that were ever started in that folder apart.
    """

    def __init__(self, run_dir: str, launch: str) -> None:
        self._path = Path(run_dir) / JOURNAL_FILE
        self._launch = launch
        found = read_json(self._path)
        self.found: Mapping[str, Any] | None = found if found.get("launch") == launch else None

    def write(self, facts: Mapping[str, Any]) -> None:
        """Keep these facts, in place of all before."""
        with full_disk_tolerated():
            write_atomically(self._path, dump_json({"launch": self._launch, **facts}) + "\n")


def plan_from(facts: Mapping[str, Any] | None) -> Plan | None:
    """A plan as it was before it became JSON."""
    if facts is None:
        return None
    predicted = facts["predicted"]
    return Plan(
        generation=facts["generation"],
        schedule=facts["schedule"],
        num_microbatches=facts["num_microbatches"],
        layers=tuple(facts["layers"]),
        stages=tuple(StagePlan(**stage) for stage in facts["stages"]),
        predicted=Prediction(
            step_s=predicted["step_s"],
            bubble_ratio=predicted["bubble_ratio"],
            stage_busy_s=tuple(predicted["stage_busy_s"]),
            stage_memory_bytes=tuple(predicted["stage_memory_bytes"]),
        ),
        reasons=tuple(facts["reasons"]),
    )


def result_from(facts: Mapping[str, Any] | None) -> RunResult | None:
    """A result as it was before it became JSON."""
    return None if facts is None else RunResult(**facts)
