"""What a coordinator leaves to its successor."""

import json
from pathlib import Path

from elastic_trainer.actors.journal import RunJournal, plan_from, result_from
from elastic_trainer.types import Plan, Prediction, RunResult, StagePlan, to_jsonable

PLAN = Plan(
    generation=3,
    schedule="1f1b",
    num_microbatches=4,
    layers=("a", "b"),
    stages=(
        StagePlan(stage=0, first=0, stop=1, worker="stage-0"),
        StagePlan(stage=1, first=1, stop=2, worker="stage-4"),
    ),
    predicted=Prediction(
        step_s=0.1, bubble_ratio=0.25, stage_busy_s=(0.1, 0.2), stage_memory_bytes=(1, 2)
    ),
    reasons=("balanced",),
)


def test_it_is_found_by_the_launch_that_wrote_it(tmp_path: Path) -> None:
    assert RunJournal(str(tmp_path), "x").found is None
    RunJournal(str(tmp_path), "x").write({"plan": to_jsonable(PLAN), "committed": 7})
    found = RunJournal(str(tmp_path), "x").found
    assert found is not None and found["committed"] == 7
    assert plan_from(found["plan"]) == PLAN
    assert RunJournal(str(tmp_path), "y").found is None


def test_a_torn_file_is_none(tmp_path: Path) -> None:
    RunJournal(str(tmp_path), "x").write({"committed": 7})
    file = tmp_path / "journal.json"
    file.write_text(file.read_text()[:-5])
    assert RunJournal(str(tmp_path), "x").found is None


def test_values_survive_json() -> None:
    result = RunResult(
        name="r", status="completed", reason="", run_dir="/r", update=3, metrics={"loss": 0.5}
    )
    assert result_from(json.loads(json.dumps(to_jsonable(result)))) == result
    assert plan_from(json.loads(json.dumps(to_jsonable(PLAN)))) == PLAN
    assert plan_from(None) is None and result_from(None) is None
