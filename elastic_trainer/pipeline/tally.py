"""What a stage holds and measures while it runs one segment."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from elastic_trainer.pipeline.link import Link
from elastic_trainer.pipeline.stage import Activation, Held, tensors_of
from elastic_trainer.pipeline.weights import InUse
from elastic_trainer.schedule.actions import Kind
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import StageReport, UpdateReport, WorkerId

PHASES = ("forward", "backward", "optimizer", "send", "recv", "idle")

_PHASE_OF = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.OPT: "optimizer",
    Kind.REDUCE: "optimizer",
    Kind.TIE: "optimizer",
    Kind.SEND_F: "send",
    Kind.SEND_B: "send",
    Kind.SEND_G: "send",
    Kind.SEND_W: "send",
}
_NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()
_clock = time.perf_counter


class Tally:
    """The state of one run of a segment.

    `live` maps a microbatch between its forward and its backward to what the backward needs;
    `outputs` and `gradients` wait for their SEND. `where` gives update and index in the batch of
    each microbatch. Peak activation bytes are those measured on the segment's first microbatch,
    for the others in proportion to their samples.
    """

    def __init__(self, segment: Segment, stage: int, link: Link) -> None:
        self.segment = segment
        self.training = segment.kind == "train"
        self.where = [(b.update, i) for b in segment.batches for i in range(len(b.microbatches))]
        self.live: dict[int, tuple[Held, InUse]] = {}
        self.outputs: dict[int, Activation] = {}
        self.gradients: dict[int, list[Tensor | None]] = {}
        self.last_use: InUse | None = None
        self.agreed_norm: float | None = None
        self.max_staleness = 0
        self._stage = stage
        self._link = link
        self._position = [
            p for p, b in enumerate(segment.batches) for _ in range(len(b.microbatches))
        ]
        self._samples = [m.num_samples for b in segment.batches for m in b.microbatches]
        self._losses: dict[int, float] = {}
        self._updates: list[UpdateReport] = []
        self._busy = dict.fromkeys(PHASES, 0.0)
        self._bytes_per_sample: float | None = None
        self._live_samples = 0
        self._peak_live = 0
        self._peak_live_samples = 0
        self._sent_before = link.bytes_sent
        self._received_before = link.bytes_received
        self._waited = 0.0
        self._waited_before = 0.0
        self._phase = ""
        self._counted = 0.0
        self._began = self._started = _clock()

    def position(self, microbatch: int) -> int:
        """Position in the segment of the update that the microbatch belongs to."""
        return self._position[microbatch]

    def num_valid(self, microbatch: int) -> int:
        """Valid items of the whole update that the microbatch belongs to."""
        return self.segment.batches[self._position[microbatch]].num_valid

    def start(self, kind: Kind) -> None:
        """An action starts."""
        self._phase = _PHASE_OF[kind]
        self._counted = 0.0
        self._started = _clock()
        self._waited_before = self._waited

    def spent_s(self) -> float:
        """What the action has taken so far, without its waits."""
        return _clock() - self._started - (self._waited - self._waited_before)

    @contextlib.contextmanager
    def aside(self, kind: Kind) -> Iterator[None]:
        """Count what happens inside as an action of this kind."""
        phase = self._phase
        self._turn(_PHASE_OF[kind])
        yield
        self._turn(phase)

    def _turn(self, phase: str) -> None:
        spent_s = self.spent_s()
        self._busy[self._phase] += spent_s - self._counted
        self._counted = spent_s
        self._phase = phase

    def stop(self) -> None:
        """The action is over: what it did not wait counts for its phase."""
        self._busy[self._phase] += self.spent_s() - self._counted

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for a message."""
        started = _clock()
        try:
            yield
        finally:
            self._waited += _clock() - started

    def hold(self, microbatch: int, held: Held, use: InUse) -> None:
        """Keep what a forward left, and count how much is alive."""
        self.live[microbatch] = (held, use)
        self._live_samples += self._samples[microbatch]
        self._peak_live = max(self._peak_live, len(self.live))
        self._peak_live_samples = max(self._peak_live_samples, self._live_samples)
        if held.trees and self._bytes_per_sample is None:
            kept = {
                t.untyped_storage().data_ptr(): t.nbytes for x in held.trees for t in tensors_of(x)
            }
            self._bytes_per_sample = sum(kept.values()) / max(1, self._samples[microbatch])

    def release(self, microbatch: int, use: InUse) -> None:
        """A backward is over: what its forward left is freed."""
        del self.live[microbatch]
        self.last_use = use
        self._live_samples -= self._samples[microbatch]

    def measuring(self, microbatch: int, weights: set[int]) -> AbstractContextManager[Any]:
        """Measure what autograd saves, but for the weights, in the segment's first forward."""
        if not self.training or microbatch > 0:
            return _NO_CONTEXT
        return self._measuring(max(1, self._samples[microbatch]), weights)

    @contextlib.contextmanager
    def _measuring(self, num_samples: int, weights: set[int]) -> Iterator[None]:
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        if sizes:
            kept = sum(size for pointer, size in sizes.items() if pointer not in weights)
            self._bytes_per_sample = kept / num_samples

    def add_loss(self, microbatch: int, loss: float) -> None:
        """The loss, a sum, of a microbatch."""
        position = self._position[microbatch]
        self._losses[position] = self._losses.get(position, 0.0) + loss

    def finish_update(self, microbatch: int, norm: float | None, *, skipped: bool) -> None:
        """Note that this stage has applied, or skipped, the update that `microbatch` closes."""
        position = self._position[microbatch]
        loss = self._losses.get(position)
        if loss is not None:
            loss /= max(1, self.num_valid(microbatch))
        update = self.segment.batches[position].update
        self._updates.append(
            UpdateReport(
                update=update, loss=loss, grad_norm=norm, finished_at=time.time(), skipped=skipped
            )
        )

    def report(self, worker: WorkerId, stash_copies: int) -> StageReport:
        """What was measured."""
        wall_s = _clock() - self._began
        self._busy["recv"] = self._waited
        self._busy["idle"] = max(0.0, wall_s - sum(self._busy.values()))
        evaluated = not self.training and bool(self._losses)
        return StageReport(
            stage=self._stage,
            worker=worker,
            generation=self.segment.generation,
            segment=self.segment.index,
            updates=tuple(self._updates),
            busy_s=self._busy,
            wall_s=wall_s,
            peak_live_activations=self._peak_live,
            peak_activation_bytes=round(self._peak_live_samples * (self._bytes_per_sample or 0)),
            stash_copies=stash_copies,
            max_staleness=self.max_staleness,
            sent_bytes=self._link.bytes_sent - self._sent_before,
            received_bytes=self._link.bytes_received - self._received_before,
            eval_loss_sum=sum(self._losses.values()) if evaluated else 0.0,
            eval_num_valid=sum(b.num_valid for b in self.segment.batches) if evaluated else 0,
        )
