"""A stage worker: one stage of the model on one device. A plain class; `handles.py` makes it an
actor whose compute calls run one by one, beside a few control calls."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from elastic_trainer.actors import heap
from elastic_trainer.actors.fence import Fence
from elastic_trainer.actors.links import (
    Edges,
    addresses,
    open_channels,
    open_state_channel,
    own_ip,
)
from elastic_trainer.actors.planning import own_cores, profile_facts
from elastic_trainer.actors.priority import compute_in_long_slices
from elastic_trainer.actors.pulse import ASKS_PER_LIMIT
from elastic_trainer.actors.restoring import Gathered, gather
from elastic_trainer.actors.watch import Mark, Standing
from elastic_trainer.actors.watchdog import Watchdog, leave
from elastic_trainer.checkpoint.layers import BackgroundSaver
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.state_service import StateService
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config
from elastic_trainer.elastic.instructions import INITIAL
from elastic_trainer.errors import (
    CheckpointError,
    ClusterError,
    ElasticTrainerError,
    FencedError,
)
from elastic_trainer.models.layers import build_blank
from elastic_trainer.models.registry import load_model, ties
from elastic_trainer.pipeline.failures import place, update_of
from elastic_trainer.pipeline.feed import ChannelFeed
from elastic_trainer.pipeline.hooks import HookSet, RuntimeHooks
from elastic_trainer.pipeline.overheads import with_messages
from elastic_trainer.pipeline.profiler import device_class, profile_layers
from elastic_trainer.pipeline.runtime import StageRuntime
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import (
    ConfigureReport,
    LayerName,
    Plan,
    Profile,
    Restore,
    StagePlan,
    StageReport,
    WorkerId,
)

Description = Mapping[str, Any]
TIDY_S = 2.0  # what a worker that ends itself takes at most to remove its sockets


class StageWorker:
    """Holds the layers that the plan gives it, and runs segments on them."""

    def __init__(self, worker: WorkerId, config: Config, private_dir: str) -> None:
        self.worker = worker
        self.config = config
        self.device = _own_device()
        torch.set_num_threads(config.numerics.threads_per_stage)
        heap.keep(self.device.type)
        self.model = load_model(config)
        self._channels = open_channels(worker, config, private_dir, self.device)
        self._edges = Edges(self._channels, self.device.type)
        self._state_channel = open_state_channel(worker, config, private_dir)
        self._state = StateService(worker, self._state_channel, config.elastic.stall_limit_s)
        self._fence = Fence(worker)
        self._private_dir = Path(private_dir)
        self._runtime: StageRuntime | None = None
        self._hooks = HookSet()
        self._plan: Plan | None = None
        self._loader: WorkerId = ""
        self._saver: BackgroundSaver | None = None
        self._segment: Segment | None = None  # the one at hand
        self._mark = Mark((0, 0), "its start")
        self._watchdog = Watchdog(
            2 * config.elastic.stall_limit_s, lambda: leave(self._close_sockets, TIDY_S)
        )
        self._watchdog.start()

    def describe(self) -> Description:
        """Where this worker is, how to reach it, and what the model looks like."""
        self._watchdog.heard()
        return {
            "addresses": addresses(self._channels),
            "state_address": self._state_channel.address(),
            "device": self.device.type,
            "device_class": device_class(self.device),
            "memory_bytes": _memory_bytes(self.device),
            "node_ip": own_ip(),
            "cores": own_cores() if self.device.type == "cpu" else None,
            "pid": os.getpid(),
            "layers": [spec.name for spec in self.model.layers],
            "ties": [(owner, follower) for owner, follower, *_ in ties(self.model)],
            "input_fields": list(self.model.input_fields),
            "label_fields": list(self.model.label_fields),
            "profile_facts": profile_facts(self.config),
            "batch_fields": [list(spec.batch_fields) for spec in self.model.layers],
        }

    def ping(self, generation: int = 0, stored: int = -1, committed: int = -1) -> Mark:
        """How far the compute thread is; answers whenever the process can, whatever it does.

        Args:
            generation: what the rest is told of.
            stored: every layer's state after it stands at two places.
            committed: all stages hold it.
        """
        self._watchdog.heard()
        if generation == self._fence.generation:
            self._state.progress(generation, stored, committed)
        mark = self._mark._replace(snapshot_update=self._state.acknowledged)
        segment, runtime = self._segment, self._runtime
        if segment is None or runtime is None:
            return mark
        done, stage = runtime.progress, runtime.stage
        where = f"{place(segment, stage, done)}, {update_of(segment, stage, done)}"
        standing = Standing(segment.generation, segment.index, done, runtime.waits_for)
        return mark._replace(at=(mark.at[0], done), place=where, standing=standing)

    def profile(self, sample: Mapping[str, "np.ndarray[Any, Any]"]) -> Profile:
        """Measure every layer on one microbatch."""
        torch.set_num_threads(self.config.numerics.threads_per_stage)
        fields = {name: torch.from_numpy(array.copy()) for name, array in sample.items()}
        layers = iter(self.model.layers)
        profile = profile_layers(
            self.model,
            self.config,
            fields,
            self.device,
            advanced=lambda: self._at(f"the profile of layer {next(layers).name}"),
        )
        self._at("the profile of messages")
        return with_messages(profile, partial(ZmqChannel, private_dir=self._private_dir))

    def abort(self, generation: int, reason: str) -> None:
        """Wake whatever waits in `generation` or an older one; its queued work ends at once."""
        self._watchdog.heard()
        self._fence.end(generation, reason, self._interrupt)

    def take_stock(
        self, generation: int, peers: Mapping[WorkerId, Description]
    ) -> Mapping[int, Sequence[LayerName]]:
        """Enter `generation`, and say which layers this worker can give away, by update.

        A segment that did not come to its end leaves layers that belong to no update: they do not
        count. Copies in memory do.

        Args:
            peers: descriptions of all other living workers.
        """
        self._watchdog.heard()
        self._at("taking stock")
        self._enter(generation, peers)
        return self._state.stock()

    def configure(
        self,
        plan: Plan,
        peers: Mapping[WorkerId, Description],
        restore: Restore,
        buddy: WorkerId | None,
    ) -> ConfigureReport:
        """Take over this worker's stage of `plan`; without one there it becomes idle.

        Args:
            plan: the plan; its generation fences everything older.
            peers: descriptions of all other living workers, and of the loader that feeds it.
            restore: which state to take over, and where each layer of the plan is.
            buddy: who keeps copies of this worker's snapshots.
        """
        self._watchdog.heard()
        self._at("taking over its layers")
        begin = time.monotonic()
        self._enter(plan.generation, peers)
        mine = next((s for s in plan.stages if s.worker == self.worker), None)
        gathered = Gathered()
        if mine is not None:
            colleagues = {s.worker for s in plan.stages}
            self._edges.connect(
                {w: d for w, d in peers.items() if w in colleagues or d.get("role") == "loader"}
            )
            loaders = (w for w, d in peers.items() if d.get("role") == "loader")
            self._loader = next(loaders, "")  # none where the stage needs no data
            layers = plan.layers[mine.first : mine.stop]
            gathered = gather(layers, restore, self._state, self._at)
        self._take_over(plan, mine, restore, gathered)
        heap.give_back()
        self._state.restored(restore.update, buddy)
        return ConfigureReport(
            update=restore.update,
            own_bytes=gathered.own_bytes,
            peer_bytes=gathered.peer_bytes,
            snapshot_bytes=gathered.snapshot_bytes,
            storage_bytes=gathered.storage_bytes,
            seconds=time.monotonic() - begin,
        )

    def run_segment(self, segment: Segment) -> StageReport:
        """Run one segment to its commit point."""
        runtime = self._active(segment.generation)
        training = segment.kind == "train"
        if training:
            self._check_order(runtime, segment.first_update)
            self._state.withdraw()
        compute_in_long_slices(self.device.type)
        runtime.progress = 0
        self._at("a segment")
        self._segment = segment
        try:
            report = runtime.run(segment)
        finally:
            self._segment = None
        if not training:
            return report
        states = runtime.layer_states()
        self._state.offer(runtime.committed, states, _facts(runtime))
        if segment.snapshot:
            self._at(f"the snapshot after update {runtime.committed}")
            taken_s, behind_s = self._state.snapshot(runtime.committed, states, _facts(runtime))
            if self.device.type != "cpu":
                behind_s = 0.0  # not on what computes
            report = replace(report, snapshot_s=taken_s, behind_s=behind_s)
        return replace(report, snapshot_update=self._state.acknowledged)

    def save(self, generation: int, update: int, root: str) -> Mapping[str, Any] | str:
        """Snapshot the state after `update` to host memory; a thread writes it to `root`.

        Returns:
            What belongs into the manifest besides layers: the state of the loss scaler. A text
            says why nothing could be saved: training goes on without this checkpoint.
        """
        runtime, plan = self._active(generation), self._plan
        assert plan is not None
        if runtime.committed != update or not runtime.at_commit_point:
            raise FencedError(f"{self.worker} does not hold the state after update {update}")
        try:
            if self._saver is None:
                self._saver = BackgroundSaver(CheckpointStore(root), plan.layers)
        except CheckpointError as error:
            return f"{self.worker}: {error}"
        if not self._saver.save(update, runtime.layer_states()):
            return f"{self.worker} is still writing an earlier checkpoint"
        return _facts(runtime)

    def saved(self, update: int) -> SaveProgress:
        """How writing `update` stands; waits a while for its end, to be asked again."""
        assert self._saver is not None, "save comes first"
        wait_s = self.config.elastic.stall_limit_s / ASKS_PER_LIMIT
        progress = self._saver.progress(update, wait_s)
        if progress.problem is None:
            return progress
        return replace(progress, problem=f"{self.worker}: {progress.problem}")

    def inject(self, name: str, hooks: RuntimeHooks | None) -> None:
        """Call `hooks` around the actions of the next segments; None: those of this name no more.

        For faults on purpose, see `elastic_trainer.testing.faults`.
        """
        self._hooks.put(name, hooks)

    def close(self) -> None:
        """Close sockets and wait for the writer."""
        self._watchdog.stop()
        if self._saver is not None:
            self._saver.wait(self.config.elastic.stall_limit_s)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._state.close()
        for channel in self._channels.values():
            channel.close()

    def _enter(self, generation: int, peers: Mapping[WorkerId, Description]) -> None:
        """Leave older generations behind, and be reachable for these peers."""
        reachable = {w: d["state_address"] for w, d in peers.items() if "state_address" in d}

        def begin() -> None:
            self._edges.exchange.advance(generation)
            self._state.enter(generation, reachable)

        self._fence.enter(generation, begin)

    def _interrupt(self, error: Exception) -> None:
        self._edges.exchange.interrupt(error)
        if (runtime := self._runtime) is not None:
            runtime.interrupt(error)
        self._state.interrupt(error)  # may wait while a layer is copied into a socket

    def _take_over(
        self, plan: Plan, mine: StagePlan | None, restore: Restore, gathered: Gathered
    ) -> None:
        """Hold exactly the layers of `mine`, in the state that was gathered.

        Layers that go to others are offered until training goes on.
        """
        old, update = self._runtime, restore.update
        offered = self._state.offered(update)
        if offered is None:
            self._state.withdraw()  # of another update: its tensors are about to be written to
        leaving = dict(offered.states) if offered is not None else {}
        facts = offered.facts if offered is not None else {}
        self._runtime, self._plan = None, plan
        if mine is not None:
            modules = old.release_modules() if old is not None else {}
            runtime = self._build(plan, mine, restore, modules)
            initial = runtime.layer_states()
            runtime.load_states({**initial, **gathered.states}, update, gathered.lent)
            if gathered.facts is not None:
                runtime.load_scaler(gathered.facts.get("scaler"))
            self._runtime = runtime
            leaving.update(runtime.layer_states())
            facts = _facts(runtime)
        if leaving:
            self._state.offer(update, leaving, facts)

    def _build(
        self, plan: Plan, mine: StagePlan, restore: Restore, modules: Mapping[str, Any]
    ) -> StageRuntime:
        """A runtime whose layers hold initial weights where those are wanted, and else anything."""
        given = {}
        for spec in self.model.layers[mine.first : mine.stop]:
            if restore.sources[spec.name] != INITIAL:
                known = modules.get(spec.name)
                given[spec.name] = (
                    build_blank(spec, self.config.train.seed, self.device)
                    if known is None
                    else known
                )
        return StageRuntime(
            stage=mine.stage,
            plan=plan,
            model=self.model,
            config=self.config,
            exchange=self._edges.exchange,
            workers=[s.worker for s in plan.stages],
            feed=ChannelFeed(self._edges.exchange, self._loader, plan.generation),
            device=self.device,
            hooks=self._hooks,
            layers=given,
        )

    def _check_order(self, runtime: StageRuntime, first_update: int) -> None:
        """Refuse to train from a state that is not that before `first_update`."""
        if not runtime.at_commit_point or runtime.committed != first_update - 1:
            raise FencedError(
                f"{self.worker} cannot train update {first_update}: it was last seen whole after "
                f"update {runtime.committed}"
            )

    def _at(self, what: str) -> None:
        self._mark = Mark((self._mark.at[0] + 1, 0), what)

    def _active(self, generation: int) -> StageRuntime:
        self._watchdog.heard()
        self._fence.check(generation)
        plan, runtime = self._plan, self._runtime
        if plan is None or runtime is None or plan.generation != generation:
            raise ElasticTrainerError(f"{self.worker} has no stage yet", "configure comes first.")
        return runtime


def _facts(runtime: StageRuntime) -> dict[str, Any]:
    """What belongs to an update besides layers."""
    return {"scaler": runtime.scaler_state}


def _own_device() -> torch.device:
    """The device that Ray has given this actor."""
    gpus = ray.get_gpu_ids()
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ClusterError(
            f"Ray assigned GPU {gpus[0]} to this worker, but torch finds no CUDA device",
            "Install a CUDA build of torch on the node, or set cluster.resources_per_worker.",
        )
    return torch.device("cuda", 0)


def _memory_bytes(device: torch.device) -> int | None:
    """Device memory; None for a CPU, whose memory stages share."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
