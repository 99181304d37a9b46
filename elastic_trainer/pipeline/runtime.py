"""One stage at work: performs the actions of a segment, one after the other.

The loop knows nothing of schedules: where OPT stands in the list decides whether a run is
synchronous, and what must arrive before an action is in `_do_*`. RECV actions need no work here,
since channels buffer what arrives early; the action that needs a message waits for it, never longer
than the stall limit.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.models.layers import ModelSpec
from elastic_trainer.pipeline import reduce
from elastic_trainer.pipeline.failures import explain, locked
from elastic_trainer.pipeline.feed import Feed
from elastic_trainer.pipeline.hooks import HookSet
from elastic_trainer.pipeline.link import Link, aligned, with_gaps, without_gaps
from elastic_trainer.pipeline.stage import Activation, Stage, is_finite
from elastic_trainer.pipeline.tally import Tally
from elastic_trainer.pipeline.weights import InUse, LayerState, StageWeights
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.schedule.build import delay, is_asynchronous, most_left
from elastic_trainer.schedule.culprit import LOADER
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.types import Plan, StageReport, WorkerId

_NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()


class StageRuntime:
    """Runs segments on one stage of a plan, and holds its layers' state in between.

    Args:
        stage: index of the stage in `plan`.
        exchange: reaches all other stages by the names in `workers` (one per stage).
        feed: where inputs, labels and other fields come from.
        layers: modules by layer name that exist already; their state is not touched. All others are
            built with initial weights.
        compute_lock: held while layers run; needed where several stages share one process, and with
            it torch's random number generator.
    """

    def __init__(
        self,
        *,
        stage: int,
        plan: Plan,
        model: ModelSpec,
        config: Config,
        exchange: Link,
        workers: Sequence[WorkerId],
        feed: Feed,
        device: torch.device,
        hooks: HookSet | None = None,
        layers: Mapping[str, nn.Module] | None = None,
        compute_lock: "threading.Lock | None" = None,
    ) -> None:
        self.stage = stage
        self.committed = 0
        self.at_commit_point = True
        self.progress = 0
        self.waits_for: int | None = None  # whose message, until it has come; LOADER: a batch
        self._plan = plan
        self._config = config
        self._link = exchange
        self._workers = list(workers)
        self._feed = feed
        self._device = device
        self._hooks = hooks or HookSet()
        self._compute_lock = compute_lock
        self._stall_limit_s = config.elastic.stall_limit_s
        self._interruption: Exception | None = None
        self._num_stages = plan.num_stages
        self._most_left = most_left(plan.schedule, stage)
        self._is_async = is_asynchronous(plan.schedule)
        self._delay = delay(stage, self._num_stages) if self._is_async else 0
        self._max_norm = config.train.max_grad_norm
        self._scaler = reduce.make_scaler(config, self._is_async)
        self._needs_agreement = self._max_norm > 0 or self._scaler is not None
        with self._computing():
            stage_plan = plan.stages[stage]
            self._layers = Stage(stage_plan, self._num_stages, model, config, device, layers)
            self._weights = StageWeights(
                self._layers.layers, model, plan, config, stage, self._delay
            )
        self._handlers: dict[Kind, Callable[[Action, Tally], None]] = {
            Kind.F: self._do_forward,
            Kind.B: self._do_backward,
            Kind.SEND_F: self._do_send_activation,
            Kind.SEND_B: self._do_send_gradient,
            Kind.SEND_G: self._do_send_tied_gradient,
            Kind.SEND_W: self._do_send_tied_weights,
            Kind.TIE: self._do_tie,
            Kind.REDUCE: self._do_reduce,
            Kind.OPT: self._do_optimizer,
        }

    def run(self, segment: Segment) -> StageReport:
        """Perform this stage's actions of `segment`; afterwards its last update is committed.

        Raises:
            NonFiniteError: a NaN or an infinity; the update was not applied here.
            StallError: a peer did not deliver within the stall limit.
            ElasticTrainerError: whatever else ended the segment; the state is then that of no
                commit point and must be restored.
        """
        if self._device.type == "cpu":
            torch.set_num_threads(self._config.numerics.threads_per_stage)
        training = segment.kind == "train"
        self.waits_for = None
        with self._computing():
            self._layers.begin(training=training)
        if training:
            self.at_commit_point = False
            self._weights.begin()
        tally = Tally(segment, self.stage, self._link)
        try:
            self._hooks.begin(self.stage, segment)
            self._perform(segment.actions[self.stage], tally)
        except Exception as error:
            told = explain(error, segment, self.stage, self._workers[self.stage], self.progress)
            if told is error:
                raise
            raise told from error
        if training:
            assert self._weights.ring.newest == len(segment.batches), "a segment ends drained"
            self.committed = segment.last_update
            self.at_commit_point = True
        return tally.report(self._workers[self.stage], self._weights.ring.copies)

    def _perform(self, actions: Sequence[Action], tally: Tally) -> None:
        handlers, hooks = self._handlers, self._hooks
        for index, action in enumerate(actions):
            self.progress = index
            if self._interruption is not None:
                raise self._interruption
            hooks.before(action)
            handler = handlers.get(action.kind)
            if handler is not None:
                tally.start(action.kind)
                handler(action, tally)
                hooks.pace(action, tally.spent_s)
                tally.stop()
            hooks.after(action)
        self.progress = len(actions)

    def _do_forward(self, action: Action, tally: Tally) -> None:
        j = action.microbatch
        update, index = tally.where[j]
        training = tally.training
        activation = None
        if not self._layers.is_first:
            message = self._receive("F", j, self.stage - 1, tally)
            activation = Activation(message.meta["tree"], message.tensors, message.meta["grad"])
        fields: Mapping[str, Tensor] = {}
        if self._layers.needs_fields:
            with self._waiting(LOADER, tally):
                kind = tally.segment.kind
                fields = self._feed.fetch(update, index, kind, self._stall_limit_s)
        use = self._weights.install_newest()
        if training:
            self._weights.check_tied(tally.position(j))
        measuring = tally.measuring(j, self._weights.storages() if j == 0 else set())
        with self._computing(), measuring:
            output, held = self._layers.forward(
                update, index, activation, fields, training=training
            )
        if isinstance(output, Activation):
            tally.outputs[j] = output
        else:
            tally.add_loss(j, output.item())
        if training:
            tally.hold(j, held, use)

    def _do_backward(self, action: Action, tally: Tally) -> None:
        j = action.microbatch
        held, use = tally.live[j]
        lag = self._weights.ring.newest - use.version
        assert lag == min(tally.position(j), self._delay), f"{action} is {lag} updates late"
        tally.max_staleness = max(tally.max_staleness, lag)
        grads: list[Tensor | None]
        if self._layers.is_last:
            # The loss is a sum: one division per update, by its valid items.
            scale = 1.0 if self._scaler is None else self._scaler.scale
            grads = [torch.full_like(held.outputs[0], scale / max(1, tally.num_valid(j)))]
        else:
            grads = with_gaps(self._receive("B", j, self.stage + 1, tally))
        with self._computing():
            if held.trees:
                self._weights.install(use)
            inputs = self._layers.backward(held, grads)
            if self._config.numerics.check_finite and self._scaler is None:
                self._check_input_gradients(inputs, tally, j, use)
        if not self._layers.is_first:
            tally.gradients[j] = inputs
        tally.release(j, use)

    def _do_optimizer(self, action: Action, tally: Tally) -> None:
        j = action.microbatch
        update, _ = tally.where[j]
        if self._is_async or not self._needs_agreement:
            norm = self._local_norm(j, tally)
        else:
            if self._num_stages == 1:  # schedules of one stage may leave REDUCE out
                self._do_reduce(action, tally)
            assert tally.agreed_norm is not None, f"{action} without REDUCE before it"
            norm, tally.agreed_norm = tally.agreed_norm, None
        factor = 1.0 if norm is None else reduce.clip_factor(norm, self._max_norm)
        overflowed = self._scaler is not None and norm is not None and not math.isfinite(norm)
        if self._scaler is not None:
            factor /= self._scaler.scale
        self._weights.step(update, factor, skip=overflowed)
        if self._scaler is not None:
            self._scaler.update(overflowed)
        tally.finish_update(j, None if overflowed else norm, skipped=overflowed)

    def _do_reduce(self, action: Action, tally: Tally) -> None:
        """Exchange norms with all stages, so that all agree on the factor, or on giving up."""
        j = action.microbatch
        if tally.agreed_norm is not None:
            return
        self._collect(j, tally)
        mine = self._weights.norms()
        if self._num_stages == 1:
            total = reduce.combine([mine])
        elif self.stage == 0:
            parts = [mine]
            for other in range(1, self._num_stages):
                message = self._receive("N", j, other, tally)
                parts.append(reduce.norms_from_message(message, other))
            total = reduce.combine(parts)
            for other in range(1, self._num_stages):
                self._send("N", j, other, reduce.total_to_message(total), tally)
        else:
            self._send("N", j, 0, reduce.norms_to_message(mine), tally)
            total = reduce.total_from_message(self._receive("N", j, 0, tally))
        norm = total.norm
        if self._scaler is not None:
            norm /= self._scaler.scale
            self._scaler.refuse_if_hopeless(total, tally.where[j][0])
        elif total.bad_stage >= 0 and self._config.numerics.check_finite:
            update, _ = tally.where[j]
            raise reduce.not_finite(update, -1, total.bad_layer, total.bad_stage, "gradient")
        tally.agreed_norm = norm

    def _local_norm(self, j: int, tally: Tally) -> float | None:
        """The norm of this stage alone, to clip asynchronously or to see that all is finite."""
        self._collect(j, tally)
        clips = self._is_async and self._max_norm > 0
        if not clips and not self._config.numerics.check_finite:
            return None
        norms = self._weights.norms()
        if norms.bad_layer and self._config.numerics.check_finite:
            update, index = tally.where[j]
            where = index if self._is_async else -1
            raise reduce.not_finite(update, where, norms.bad_layer, self.stage, "gradient")
        return reduce.combine([norms]).norm if clips else None

    def _collect(self, j: int, tally: Tally) -> None:
        """Bring the update's gradients together, those of tied parameters on other stages too."""
        assert tally.last_use is not None, "an update without a backward"
        self._finish_backwards(tally)
        tied = [
            (follower, with_gaps(self._receive("G", j, follower, tally)))
            for follower in self._weights.follower_stages
        ]
        self._weights.collect_gradients(tally.last_use.version, tied)

    def _do_send_activation(self, action: Action, tally: Tally) -> None:
        output = tally.outputs.pop(action.microbatch)
        message = Message(output.tensors, {"tree": output.spec, "grad": output.wants_grad})
        self._send("F", action.microbatch, self.stage + 1, message, tally)

    def _do_send_gradient(self, action: Action, tally: Tally) -> None:
        grads = tally.gradients.pop(action.microbatch)
        self._send("B", action.microbatch, self.stage - 1, without_gaps(grads), tally)
        self._finish_backwards(tally, keep=self._most_left)

    def _do_send_tied_gradient(self, action: Action, tally: Tally) -> None:
        assert action.peer is not None and tally.last_use is not None
        self._finish_backwards(tally)
        grads = self._weights.take_tied_gradients(action.peer, tally.last_use)
        self._send("G", action.microbatch, action.peer, without_gaps(grads), tally)

    def _do_send_tied_weights(self, action: Action, tally: Tally) -> None:
        assert action.peer is not None
        message = Message(self._weights.tied_weights(action.peer))
        self._send("W", action.microbatch, action.peer, message, tally)

    def _do_tie(self, action: Action, tally: Tally) -> None:
        assert action.peer is not None
        message = self._receive("W", action.microbatch, action.peer, tally)
        version = tally.position(action.microbatch) + 1
        self._weights.install_tied(action.peer, message.tensors, version)

    @property
    def scaler_state(self) -> dict[str, Any] | None:
        """State of the fp16 loss scaler, the same on every stage; None without one."""
        return None if self._scaler is None else self._scaler.state()

    def load_scaler(self, state: Mapping[str, Any] | None) -> None:
        """Restore `scaler_state`; None leaves the scaler as it is."""
        if self._scaler is not None and state is not None:
            self._scaler.load(state)

    @property
    def num_left(self) -> int:
        """Backwards that have left gradients of weights for later."""
        return self._layers.left.num_left

    def needed_layers(self) -> list[str]:
        """Names of the layers whose state `load_states` needs."""
        return list(self._layers.layers)

    def layer_states(self) -> dict[str, LayerState]:
        """Live references to the state of each layer; copy them before the next segment.

        Keys are param/<name>, buffer/<name> and optim/<param>/<key>.
        """
        return self._weights.states()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the update at hand, between REDUCE and OPT, as layer/parameter."""
        return self._weights.named_gradients()

    def load_states(
        self,
        states: Mapping[str, Mapping[str, Tensor]],
        update: int,
        lent: Collection[str] = (),
    ) -> None:
        """Take over `states`, the state after `update`: copies, but of `lent` layers themselves."""
        self._weights.load(states, lent)
        self.committed = update
        self.at_commit_point = True

    def release_modules(self) -> Mapping[str, nn.Module]:
        """This stage's layers, with the newest weights, for the runtime that takes its place."""
        self._weights.install_newest()
        return self._layers.release()

    def interrupt(self, error: Exception) -> None:
        """Make the running segment, and later ones, end with `error`; from any thread."""
        self._interruption = error
        self._link.interrupt(error)

    def _send(self, kind: str, j: int, stage: int, message: Message, tally: Tally) -> None:
        update, index = tally.where[j]
        tag = Tag(tally.segment.generation, kind, update, index)
        if self._hooks.sends(self._workers[stage], tag):
            self._link.send(self._workers[stage], tag, message)

    def _receive(self, kind: str, j: int, stage: int, tally: Tally) -> Message:
        update, index = tally.where[j]
        tag = Tag(tally.segment.generation, kind, update, index)
        while self.num_left and not self._link.has(self._workers[stage], tag):
            with self._computing(), tally.aside(Kind.B):
                self._layers.fill_gap()
        with self._waiting(stage, tally):
            message = self._link.recv(self._workers[stage], tag, self._stall_limit_s)
        message.tensors = list(map(aligned, message.tensors))
        return message

    def _finish_backwards(self, tally: Tally, keep: int = 0) -> None:
        """Compute the gradients that all but the last `keep` backwards have left for later."""
        with self._computing(), tally.aside(Kind.B):
            self._layers.left.finish(keep)

    @contextlib.contextmanager
    def _waiting(self, sender: int, tally: Tally) -> Iterator[None]:
        """Say for whom the stage waits, and count the time; what never came stays said."""
        self.waits_for = sender
        with tally.waiting():
            yield
        self.waits_for = None

    def _check_input_gradients(
        self, grads: Sequence[Tensor | None], tally: Tally, j: int, use: InUse
    ) -> None:
        if all(grad is None or is_finite(grad) for grad in grads):
            return
        update, index = tally.where[j]
        self._layers.left.finish()
        layer = self._weights.layer_with_bad_gradient(use)
        raise reduce.not_finite(update, index, layer, self.stage, "gradient")

    def _computing(self) -> AbstractContextManager[Any]:
        if self._compute_lock is None:
            return _NO_CONTEXT
        return locked(self._compute_lock, self._stall_limit_s)
