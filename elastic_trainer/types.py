"""Value objects that several layers share. Pure data: no torch, no Ray, no I/O.

Vocabulary (docs/architecture.md): a *layer* is the smallest unit of planning and recovery, a
*stage* a contiguous range of layers on one *worker*, a *microbatch* what flows through the
pipeline, an *update* one optimizer step, a *segment* the work between two *commit points*, a
*generation* the number of the membership.

Naming: `num_` for counts, `_s` for seconds, `_bytes` for bytes. Updates count from 1: update u
turns state u-1 into state u, so "committed update u" means that every stage holds the state after
u.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

WorkerId = str
LayerName = str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """What one layer costs for one full microbatch on one class of device.

    `activation_bytes` cross the wire to the next layer; `saved_bytes` stay alive between a
    microbatch's forward and its backward, the layer's input included. `late_s` are those of
    `backward_s` after which the gradient of the layer's input could have left; `late_bytes` stay
    alive until then. `optimizer_s` is for one step on the layer's parameters. The seconds named
    `cpu` are those of them that need a core.
    """

    name: LayerName
    forward_s: float
    backward_s: float
    activation_bytes: int
    saved_bytes: int
    parameter_bytes: int
    late_s: float = 0.0
    optimizer_s: float = 0.0
    forward_cpu_s: float = 0.0
    backward_cpu_s: float = 0.0
    late_cpu_s: float = 0.0
    late_bytes: int = 0
    optimizer_cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What a stage needs beside its layers, whatever these are.

    `forward_s` and `backward_s` are for one microbatch. A message keeps its sender busy for
    `send_s` and is there `link_s` later, each with an addition per byte. The seconds named `cpu`
    are those of them that need a core; an addition per byte of a send needs one all the time.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    send_s: float = 0.0
    send_s_per_byte: float = 0.0
    link_s: float = 0.0
    link_s_per_byte: float = 0.0
    forward_cpu_s: float = 0.0
    backward_cpu_s: float = 0.0
    send_cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Costs of all layers, in model order, for microbatches of `microbatch_size` samples."""

    device_class: str
    microbatch_size: int
    layers: tuple[LayerProfile, ...]
    overheads: Overheads = Overheads()


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Stage `stage` holds layers `first` up to, not including, `stop`."""

    stage: int
    first: int
    stop: int
    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the planner expects; shown beside what is measured.

    `step_s` is one batch of `num_microbatches` (synchronous) or the same number of updates in a
    long asynchronous segment. Tuples are per stage. `bubble_ratio` is idle over total stage time.
    """

    step_s: float
    bubble_ratio: float
    stage_busy_s: tuple[float, ...]
    stage_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which layers where, in which schedule, with predictions and the reason of each choice."""

    generation: int
    schedule: str
    num_microbatches: int
    layers: tuple[LayerName, ...]
    stages: tuple[StagePlan, ...]
    predicted: Prediction
    reasons: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def stage_of_layer(self, index: int) -> int:
        """Stage that holds the layer with this index in model order."""
        return next(s.stage for s in self.stages if s.first <= index < s.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Committed position of the loader: the next row to read, in the order of its epoch.

    `row` counts rows of the epoch already begun; `offset` counts tokens of row `row` already used
    (packed text only). The order itself is a pure function of (seed, epoch), so this is all the
    state that a loader has. `sample` counts sequences already taken from the block of packed
    sequences that begins there, whose own order is shuffled.
    """

    epoch: int = 0
    row: int = 0
    offset: int = 0
    sample: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchInfo:
    """Facts of one microbatch, known before it runs.

    `sample_ids` name what it holds, for the audit; `num_tokens` counts positions, `num_valid` those
    that the loss counts. `skipped` names samples that would be in it but could not be read, each
    with the reason.
    """

    num_samples: int
    num_tokens: int
    num_valid: int
    sample_ids: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInfo:
    """Facts of the batch of one update; `end` is the loader's position behind it.

    `costs` are the seconds that all its samples together should take each group of the cost model,
    as predicted from their sizes alone; empty where samples have none.
    """

    update: int
    microbatches: tuple[MicrobatchInfo, ...]
    end: Cursor
    costs: tuple[float, ...] = ()

    @property
    def num_valid(self) -> int:
        return sum(m.num_valid for m in self.microbatches)

    @property
    def num_samples(self) -> int:
        return sum(m.num_samples for m in self.microbatches)

    @property
    def num_tokens(self) -> int:
        return sum(m.num_tokens for m in self.microbatches)

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        return tuple(entry for m in self.microbatches for entry in m.skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What one stage reports of one update. Only the last stage knows the loss; others say None.

    `loss` is the sum over the update's valid tokens divided by their number. `grad_norm` is the
    global norm before clipping (of this stage alone in asynchronous mode), None when not computed.
    """

    update: int
    loss: float | None
    grad_norm: float | None
    finished_at: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """What one stage measured in one segment. `busy_s` maps a phase to seconds:
    forward, backward, optimizer, send, recv, idle. `snapshot_s` is what the snapshot at its end
    took of the compute thread; `behind_s` what moving state has taken of the cores beside it since
    the snapshot before; `snapshot_update` the newest update whose snapshot the buddy has.
    """

    stage: int
    worker: WorkerId
    generation: int
    segment: int
    updates: tuple[UpdateReport, ...]
    busy_s: Mapping[str, float]
    wall_s: float
    peak_live_activations: int
    peak_activation_bytes: int
    stash_copies: int
    max_staleness: int
    sent_bytes: int
    received_bytes: int
    eval_loss_sum: float = 0.0
    eval_num_valid: int = 0
    snapshot_s: float = 0.0
    behind_s: float = 0.0
    snapshot_update: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Which state a worker is to take over with its layers, and whence.

    `sources` names for each layer a worker (itself: it has the state in its own memory), or
    `elastic.instructions.STORAGE` (below `root`) or `INITIAL`.
    """

    update: int
    sources: Mapping[LayerName, str]
    root: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigureReport:
    """What it took one worker to hold its layers in the state after `update`.

    Bytes by where they were: `own_bytes` in this worker's layers, `peer_bytes` in another one's,
    `snapshot_bytes` in a copy in memory, its own or another worker's, `storage_bytes` on storage.
    """

    update: int
    own_bytes: int = 0
    peer_bytes: int = 0
    snapshot_bytes: int = 0
    storage_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint on storage."""

    update: int
    path: str
    num_bytes: int
    created_at: float


def to_jsonable(value: Any) -> Any:
    """A dataclass of this module as plain dicts, lists and scalars."""
    return asdict(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended; `status` is completed, stopped or failed."""

    name: str
    status: str
    reason: str
    run_dir: str
    update: int
    loss: float | None = None
    eval_loss: float | None = None
    perplexity: float | None = None
    checkpoint: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
