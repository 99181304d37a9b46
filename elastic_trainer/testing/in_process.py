"""A whole pipeline in threads of one process, without Ray: the real runtimes over real messages."""

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from elastic_trainer.config import Config
from elastic_trainer.errors import ElasticTrainerError, FencedError, StallError
from elastic_trainer.models.layers import ModelSpec, ties
from elastic_trainer.models.losses import count_valid
from elastic_trainer.pipeline.feed import MemoryFeed
from elastic_trainer.pipeline.hooks import HookSet, RuntimeHooks
from elastic_trainer.pipeline.runtime import StageRuntime
from elastic_trainer.pipeline.weights import LayerState
from elastic_trainer.schedule.build import build, forward_only, is_asynchronous
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.transport.in_process import FaultRule, InProcessNetwork
from elastic_trainer.types import (
    BatchInfo,
    Cursor,
    MicrobatchInfo,
    Plan,
    Prediction,
    StagePlan,
    StageReport,
)

Microbatch = Mapping[str, Tensor]
Batches = Mapping[int, Sequence[Microbatch]]

_DEADLINE_S = 60.0
_WEDGED_S = 1.0


def even_plan(
    model: ModelSpec,
    num_stages: int,
    schedule: str,
    *,
    cuts: Sequence[int] | None = None,
    num_microbatches: int = 1,
) -> Plan:
    """A plan that deals out layers by number, or at `cuts`, and predicts nothing."""
    num_layers = len(model.layers)
    inner = cuts or [num_layers * stage // num_stages for stage in range(1, num_stages)]
    edges = [0, *inner, num_layers]
    stages = tuple(
        StagePlan(stage=s, first=edges[s], stop=edges[s + 1], worker=f"stage-{s}")
        for s in range(num_stages)
    )
    nothing = Prediction(
        step_s=0.0,
        bubble_ratio=0.0,
        stage_busy_s=(0.0,) * num_stages,
        stage_memory_bytes=(0,) * num_stages,
    )
    return Plan(
        generation=1,
        schedule=schedule,
        num_microbatches=num_microbatches,
        layers=model.names,
        stages=stages,
        predicted=nothing,
        reasons=(),
    )


def batch_info(update: int, microbatches: Sequence[Microbatch], model: ModelSpec) -> BatchInfo:
    """The facts that a loader would give of these microbatches."""
    infos = []
    for fields in microbatches:
        first = fields[model.input_fields[0]]
        labels = {name: fields[name] for name in model.label_fields}
        infos.append(
            MicrobatchInfo(
                num_samples=first.shape[0],
                num_tokens=first.numel(),
                num_valid=count_valid(labels),
                sample_ids=(),
            )
        )
    return BatchInfo(update=update, microbatches=tuple(infos), end=Cursor())


def stage_ties(model: ModelSpec, plan: Plan) -> list[tuple[int, int]]:
    """(owner stage, follower stage) of parameters tied across stages."""
    pairs = {(plan.stage_of_layer(t.owner), plan.stage_of_layer(t.follower)) for t in ties(model)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


class InProcessPipeline:
    """One runtime and one thread per stage.

    Args:
        train: microbatches of each update, by its number.
        evaluation: microbatches of each held-out batch.
        hooks: by stage; called around its actions.
        fault: what happens to messages on their way.
        exclusive: compute one stage at a time, which models that draw random numbers need here.
    """

    def __init__(
        self,
        model: ModelSpec,
        config: Config,
        plan: Plan,
        train: Batches,
        *,
        evaluation: Batches | None = None,
        hooks: Mapping[int, RuntimeHooks] | None = None,
        fault: FaultRule | None = None,
        exclusive: bool = True,
    ) -> None:
        self.model = model
        self.config = config
        self.plan = plan
        self._batches: dict[str, Batches] = {"train": train, "eval": evaluation or {}}
        self._num_segments = 0
        network = InProcessNetwork(fault)
        workers = [stage.worker for stage in plan.stages]
        self.channels = [network.channel(worker) for worker in workers]
        for channel in self.channels:
            channel.advance(plan.generation)
        lock = threading.Lock() if exclusive else None
        given = hooks or {}
        self.runtimes = [
            StageRuntime(
                stage=stage.stage,
                plan=plan,
                model=model,
                config=config,
                exchange=channel,
                workers=workers,
                feed=MemoryFeed(train, evaluation),
                device=torch.device("cpu"),
                hooks=HookSet(given.get(stage.stage)),
                compute_lock=lock,
            )
            for stage, channel in zip(plan.stages, self.channels, strict=True)
        ]

    def train(self, first: int, last: int) -> list[StageReport]:
        """Run the updates `first` to `last` as one segment."""
        return self.run(self.segment("train", range(first, last + 1)))

    def evaluate(self, keys: Sequence[int]) -> list[StageReport]:
        """Run these held-out batches, forward only."""
        return self.run(self.segment("eval", keys))

    def segment(self, kind: str, updates: Sequence[int]) -> Segment:
        """The segment of these updates, as a coordinator would make it."""
        infos = tuple(batch_info(u, self._batches[kind][u], self.model) for u in updates)
        groups = [len(info.microbatches) for info in infos]
        plan, train = self.plan, self.config.train
        if kind == "eval":
            actions = forward_only(plan.num_stages, sum(groups))
        else:
            agree = train.max_grad_norm > 0 or train.precision == "fp16"
            actions = build(
                plan.schedule,
                plan.num_stages,
                groups,
                ties=stage_ties(self.model, plan),
                reduce=agree and not is_asynchronous(plan.schedule),
            )
        self._num_segments += 1
        return Segment(
            generation=plan.generation,
            index=self._num_segments,
            kind="eval" if kind == "eval" else "train",
            batches=infos,
            actions=actions,
            schedule=plan.schedule,
        )

    def run(self, segment: Segment) -> list[StageReport]:
        """Run the segment on all stages.

        Raises:
            ElasticTrainerError: the first error of any stage; the others were interrupted.
        """
        outcomes: queue.Queue[StageReport | Exception] = queue.Queue()

        def work(runtime: StageRuntime) -> None:
            try:
                outcomes.put(runtime.run(segment))
            except Exception as error:
                outcomes.put(error)

        for runtime in self.runtimes:
            threading.Thread(target=work, args=(runtime,), daemon=True).start()
        reports: list[StageReport] = []
        first_error: Exception | None = None
        for _ in self.runtimes:
            try:
                # After an error all others are interrupted, and only a wedged one stays away.
                outcome = outcomes.get(timeout=_WEDGED_S if first_error else _DEADLINE_S)
            except queue.Empty:
                break
            if isinstance(outcome, StageReport):
                reports.append(outcome)
            elif first_error is None:
                first_error = outcome
                self.interrupt(FencedError("another stage failed first"))
        if first_error is not None:
            raise first_error
        if len(reports) < len(self.runtimes):
            raise StallError(f"a stage neither finished nor failed within {_DEADLINE_S:.0f} s")
        return sorted(reports, key=lambda report: report.stage)

    def interrupt(self, error: ElasticTrainerError) -> None:
        """End what all stages are doing."""
        for runtime in self.runtimes:
            runtime.interrupt(error)

    def states(self) -> dict[str, LayerState]:
        """Copies of the state of every layer, in model order."""
        states: dict[str, LayerState] = {}
        for runtime in self.runtimes:
            for layer, state in runtime.layer_states().items():
                states[layer] = {key: value.clone() for key, value in state.items()}
        return states

    def load(self, states: Mapping[str, LayerState], update: int) -> None:
        """Give every stage the state of its layers after `update`."""
        for runtime in self.runtimes:
            runtime.load_states({name: states[name] for name in runtime.needed_layers()}, update)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def with_settings(config: Config, **sections: Mapping[str, object]) -> Config:
    """`config` with some fields of some sections replaced."""
    changed = {name: replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return replace(config, **changed)
