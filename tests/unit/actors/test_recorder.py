"""What is written down of an update and of an evaluation."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.config import Config, DataConfig
from elastic_trainer.observability.runs import read_audit, read_status
from elastic_trainer.schedule.build import build
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import (
    BatchInfo,
    Cursor,
    MicrobatchInfo,
    Plan,
    Prediction,
    StagePlan,
    StageReport,
    UpdateReport,
)

NUM_STAGES = 3


def recorder(folder: Path, data_format: str = "text") -> Recorder:
    return Recorder("run", Config(data=DataConfig(format=data_format)), str(folder), 0)


@pytest.fixture
def text_run(tmp_path: Path) -> Iterator[Recorder]:
    made = recorder(tmp_path)
    yield made
    made.finish(made.result("completed", "", 1, None))


def plan(schedule: str) -> Plan:
    stages = tuple(
        StagePlan(stage=s, first=s, stop=s + 1, worker=f"stage-{s}") for s in range(NUM_STAGES)
    )
    predicted = Prediction(
        step_s=1.0, bubble_ratio=0.0, stage_busy_s=(1.0,) * 3, stage_memory_bytes=(1,) * 3
    )
    return Plan(
        generation=1, schedule=schedule, num_microbatches=1, layers=("a", "b", "c"),
        stages=stages, predicted=predicted, reasons=(),
    )  # fmt: skip


def report(stage: int, norm: float | None) -> StageReport:
    last = stage == NUM_STAGES - 1
    update = UpdateReport(
        update=1, loss=2.5 if last else None, grad_norm=norm, finished_at=100.0 + stage
    )
    return StageReport(
        stage=stage, worker=f"stage-{stage}", generation=1, segment=0, updates=(update,),
        busy_s={"forward": 0.5}, wall_s=1.0, peak_live_activations=1, peak_activation_bytes=1,
        stash_copies=0, max_staleness=0, sent_bytes=0, received_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "norms", "expected"),
    [
        ("async_1f1b", [2.0, 3.0, 6.0], 7.0),  # each stage knows its own alone
        ("async_1f1b", [2.0, None, 6.0], None),
        ("1f1b", [7.0, 7.0, 7.0], 7.0),  # they have agreed on it
        ("1f1b", [None, None, None], None),
    ],
)
def test_the_norm_in_the_metrics_is_that_of_all_stages(
    text_run: Recorder,
    tmp_path: Path,
    schedule: str,
    norms: Sequence[float | None],
    expected: float | None,
) -> None:
    micro = MicrobatchInfo(num_samples=1, num_tokens=8, num_valid=8, sample_ids=())
    segment = Segment(
        generation=1, index=0, kind="train", schedule=schedule,
        batches=(BatchInfo(update=1, microbatches=(micro,), end=Cursor()),),
        actions=build(schedule, NUM_STAGES, [1]),
    )  # fmt: skip
    reports = [report(stage, norm) for stage, norm in enumerate(norms)]
    text_run.segment(segment, reports, plan(schedule))
    (line,) = [json.loads(t) for t in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["grad_norm"] == expected
    assert (line["loss"], line["time"]) == (2.5, 102.0)


def test_samples_that_could_not_be_read_are_audited_and_counted(
    text_run: Recorder, tmp_path: Path
) -> None:
    micros = (
        MicrobatchInfo(num_samples=1, num_tokens=8, num_valid=8, sample_ids=("4",)),
        MicrobatchInfo(
            num_samples=0, num_tokens=1, num_valid=0, sample_ids=(), skipped=(("7", "cut short"),)
        ),
    )
    segment = Segment(
        generation=1, index=0, kind="train", schedule="1f1b",
        batches=(BatchInfo(update=1, microbatches=micros, end=Cursor()),),
        actions=build("1f1b", NUM_STAGES, [2]),
    )  # fmt: skip
    text_run.segment(segment, [report(s, 1.0) for s in range(NUM_STAGES)], plan("1f1b"))
    (audit,) = read_audit(tmp_path)
    assert audit == {"update": 1, "samples": [["4"], []], "skipped": {"7": "cut short"}}
    assert 'unreadable_samples_total{run="run"} 1.0' in text_run.metrics.text()
    events = (tmp_path / "events.jsonl").read_text()
    assert "sample 7 was skipped: cut short" in events


@pytest.mark.parametrize(
    ("data_format", "expected"),
    [
        ("text", math.exp(1.5)),
        ("tokens", math.exp(1.5)),
        ("media", math.exp(1.5)),
        ("columns", None),
        ("synthetic", None),
    ],
)
def test_only_text_has_a_perplexity(
    tmp_path: Path, data_format: str, expected: float | None
) -> None:
    made = recorder(tmp_path, data_format)
    assert made.result("stopped", "", 0, None).perplexity is None, "nothing was measured"
    made.evaluated(1, 3.0, 2)
    result = made.result("completed", "", 1, None)
    made.finish(result)
    assert (result.eval_loss, result.perplexity) == (1.5, expected)
    assert read_status(tmp_path)["perplexity"] == expected
