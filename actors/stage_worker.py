"""A stage worker: one stage of the model on one device. A plain class; `handles.py` makes it an
actor whose compute calls run one by one, beside a few control calls."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from elastic_trainer.actors.links import addresses, make_exchange, open_channels, own_ip
from elastic_trainer.actors.planning import profile_facts
from elastic_trainer.actors.pulse import ASKS_PER_LIMIT
from elastic_trainer.actors.watch import Mark
from elastic_trainer.checkpoint.layers import BackgroundSaver, read_layer
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config
from elastic_trainer.errors import (
    CheckpointError,
    ClusterError,
    ElasticTrainerError,
    FencedError,
)
from elastic_trainer.models.registry import load_model, ties
from elastic_trainer.pipeline.failures import place, update_of
from elastic_trainer.pipeline.feed import ChannelFeed
from elastic_trainer.pipeline.overheads import with_messages
from elastic_trainer.pipeline.profiler import device_class, profile_layers
from elastic_trainer.pipeline.runtime import StageRuntime
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.transport.exchange import Exchange
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import Plan, Profile, StageReport, WorkerId


class StageWorker:
    """Holds the layers that the plan gives it, and runs segments on them."""

    def __init__(self, worker: WorkerId, config: Config, private_dir: str) -> None:
        self.worker = worker
        self.config = config
        self.device = _own_device()
        torch.set_num_threads(config.numerics.threads_per_stage)
        self.model = load_model(config)
        self._channels = open_channels(worker, config, private_dir, self.device)
        self._private_dir = Path(private_dir)
        self._exchange: Exchange | None = None
        self._runtime: StageRuntime | None = None
        self._plan: Plan | None = None
        self._saver: BackgroundSaver | None = None
        self._segment: Segment | None = None  # the one at hand
        self._mark = Mark((0, 0), "its start")

    def describe(self) -> Mapping[str, Any]:
        """Where this worker is, how to reach it, and what the model looks like."""
        return {
            "addresses": addresses(self._channels),
            "device": self.device.type,
            "device_class": device_class(self.device),
            "memory_bytes": _memory_bytes(self.device),
            "node_ip": own_ip(),
            "pid": os.getpid(),
            "layers": [spec.name for spec in self.model.layers],
            "ties": [(owner, follower) for owner, follower, *_ in ties(self.model)],
            "input_fields": list(self.model.input_fields),
            "label_fields": list(self.model.label_fields),
            "profile_facts": profile_facts(self.config),
            "batch_fields": [list(spec.batch_fields) for spec in self.model.layers],
        }

    def ping(self) -> Mark:
        """How far the compute thread is; answers whenever the process can, whatever it does."""
        mark, segment, runtime = self._mark, self._segment, self._runtime
        if segment is None or runtime is None:
            return mark
        done, stage = runtime.progress, runtime.stage
        where = f"{place(segment, stage, done)}, {update_of(segment, stage, done)}"
        return Mark((mark.at[0], done), where)

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

    def configure(
        self,
        plan: Plan,
        peers: Mapping[WorkerId, Mapping[str, Any]],
        restore: tuple[str, int] | None,
    ) -> int:
        """Take over this worker's stage of `plan`.

        Args:
            plan: the plan; its generation fences everything older.
            peers: descriptions of all other workers and the loader.
            restore: root and update of the checkpoint to load; None starts from initial weights.

        Returns:
            The update whose state the stage holds.
        """
        self._at("building its layers")
        mine = next(s for s in plan.stages if s.worker == self.worker)
        self._exchange = make_exchange(self._channels, self.device.type, peers)
        self._exchange.advance(plan.generation)
        loader = next(name for name, d in peers.items() if d.get("role") == "loader")
        self._runtime = StageRuntime(
            stage=mine.stage,
            plan=plan,
            model=self.model,
            config=self.config,
            exchange=self._exchange,
            workers=[s.worker for s in plan.stages],
            feed=ChannelFeed(self._exchange, loader, plan.generation),
            device=self.device,
        )
        self._plan = plan
        if restore is not None:
            self._restore(self._runtime, *restore)
        return self._runtime.committed

    def run_segment(self, segment: Segment) -> StageReport:
        """Run one segment to its commit point."""
        runtime = self._active()
        runtime.progress = 0
        self._at("a segment")
        self._segment = segment
        try:
            return runtime.run(segment)
        finally:
            self._segment = None

    def save(self, update: int, root: str) -> Mapping[str, Any] | str:
        """Snapshot the state after `update` to host memory; a thread writes it to `root`.

        Returns:
            What belongs into the manifest besides layers: the state of the loss scaler. A text
            says why nothing could be saved: training goes on without this checkpoint.
        """
        runtime, plan = self._active(), self._plan
        assert plan is not None
        if runtime.committed != update:
            raise FencedError(
                f"{self.worker} holds the state after update {runtime.committed}, not {update}"
            )
        try:
            if self._saver is None:
                self._saver = BackgroundSaver(CheckpointStore(root), plan.layers)
        except CheckpointError as error:
            return f"{self.worker}: {error}"
        if not self._saver.save(update, runtime.layer_states()):
            return f"{self.worker} is still writing an earlier checkpoint"
        return {"scaler": runtime.scaler_state}

    def saved(self, update: int) -> SaveProgress:
        """How writing `update` stands; waits a while for its end, to be asked again."""
        assert self._saver is not None, "save comes first"
        wait_s = self.config.elastic.stall_limit_s / ASKS_PER_LIMIT
        progress = self._saver.progress(update, wait_s)
        if progress.problem is None:
            return progress
        return replace(progress, problem=f"{self.worker}: {progress.problem}")

    def abort(self, reason: str) -> None:
        """Wake whatever waits, with an error."""
        error = FencedError(f"the coordinator ended this generation: {reason}")
        if self._runtime is not None:
            self._runtime.interrupt(error)

    def close(self) -> None:
        """Close sockets and wait for the writer."""
        if self._saver is not None:
            self._saver.wait(self.config.elastic.stall_limit_s)
        for channel in self._channels.values():
            channel.close()

    def _restore(self, runtime: StageRuntime, root: str, update: int) -> None:
        store = CheckpointStore(root)
        manifest = store.manifest(update)
        states = {}
        for name in runtime.needed_layers():
            self._at(f"restoring layer {name}")
            states[name] = read_layer(store, manifest, name)
        runtime.load_states(states, update)
        runtime.load_scaler(manifest.extra.get("scaler"))

    def _at(self, what: str) -> None:
        self._mark = Mark((self._mark.at[0] + 1, 0), what)

    def _active(self) -> StageRuntime:
        if self._runtime is None:
            raise ElasticTrainerError(f"{self.worker} has no stage yet", "configure comes first.")
        return self._runtime


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
