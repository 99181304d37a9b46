"""When a snapshot is complete, and what is said of its cost."""

from elastic_trainer.actors.snapshots import Snapshots
from elastic_trainer.elastic import events as ev
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.testing.simulated_worker import even_cut
from elastic_trainer.types import BatchInfo, Cursor, StageReport


def segment(update: int) -> Segment:
    batch = BatchInfo(update=update, microbatches=(), end=Cursor())
    return Segment(
        generation=1, index=update, kind="train", schedule="1f1b", batches=(batch,), actions=(),
        snapshot=True,
    )  # fmt: skip


def report(stage: int, update: int, *, taken_s: float, behind_s: float, stored: int) -> StageReport:
    return StageReport(
        stage=stage, worker="ab"[stage], generation=1, segment=update, updates=(), busy_s={},
        wall_s=2.0 + stage, peak_live_activations=0, peak_activation_bytes=0, stash_copies=0,
        max_staleness=0, sent_bytes=0, received_bytes=0, snapshot_s=taken_s, behind_s=behind_s,
        snapshot_update=stored,
    )  # fmt: skip


def test_a_snapshot_costs_what_the_stage_says_that_it_costs_most() -> None:
    told: list[ev.Event] = []
    snapshots = Snapshots(told.append)
    snapshots.begin(even_cut(1, ("a", "b"), layers=4, step_s=1.0))
    for update in (1, 2):
        snapshots.sent(segment(update))
    reports = [
        report(0, 1, taken_s=0.25, behind_s=0.125, stored=-1),
        report(1, 1, taken_s=0.0625, behind_s=0.5, stored=-1),
    ]
    snapshots.reported(segment(1), reports)
    snapshots.told("a", 1)
    assert told == [] and snapshots.stored == -1
    snapshots.told("b", 1)
    stored = ev.SnapshotStored(generation=1, update=1, cost_s=0.25, behind_s=0.5, segment_s=3.0)
    assert told == [stored] and snapshots.stored == 1
