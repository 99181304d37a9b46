"""Makes the plan: which layers on which worker, what to expect, and why."""

import math
from collections.abc import Sequence

from elastic_trainer.config import Config
from elastic_trainer.errors import PlanError
from elastic_trainer.planner.cost import StageCosts
from elastic_trainer.planner.memory import MemoryModel, num_moments
from elastic_trainer.planner.partition import partition
from elastic_trainer.planner.reasons import Candidate, Choice, Cuts, explain, format_bytes
from elastic_trainer.planner.simulate import Cores, Late, Timeline, simulate
from elastic_trainer.schedule.build import build, is_asynchronous, most_left
from elastic_trainer.types import Plan, Prediction, Profile, StagePlan, WorkerId

LayerTies = Sequence[tuple[int, int]]
Limits = Sequence[int | None]
NodeCores = Sequence[tuple[str, int] | None]

_DRAINED_OVER_USED = 50  # a drain idles for P-1 microbatches: 1 in 51 is just under 2%


def commit_every(num_stages: int, setting: int = 0) -> int:
    """Updates between two drains of an asynchronous pipe.

    Filling and draining cost P-1 microbatches of the slowest stage, whatever stands between them.
    Unless `setting` says how many, there are so many that this is under 2% of the time.
    """
    return setting if setting > 0 else _DRAINED_OVER_USED * max(1, num_stages - 1)


def stage_ties(stages: Sequence[StagePlan], ties_layers: LayerTies) -> tuple[tuple[int, int], ...]:
    """(owner stage, follower stage) of the layers tied across stages, each pair once."""
    stage_of = [stage.stage for stage in stages for _ in range(stage.first, stage.stop)]
    pairs = {(stage_of[owner], stage_of[follower]) for owner, follower in ties_layers}
    return tuple(sorted((owner, follower) for owner, follower in pairs if owner != follower))


def make_plan(
    profile: Profile,
    config: Config,
    workers: Sequence[WorkerId],
    generation: int,
    ties_layers: LayerTies = (),
    memory_limits: Limits | None = None,
    cores: NodeCores | None = None,
) -> Plan:
    """Cut the profiled layers into stages, one per worker, and predict what they will do.

    Args:
        profile: measured costs of all layers.
        config: schedule, batch and, if the user wants, stages and cuts.
        workers: who can hold a stage, in order; more than needed stay idle.
        generation: number of the membership that the plan is for.
        ties_layers: (owner, follower) indices of layers that share a parameter.
        memory_limits: bytes that each worker may use, in the order of `workers`.
        cores: node of each worker that computes on CPUs, and how many it has, in the same order;
            None for one that does not, or of which it is not known.
    """
    planner = _Planner(profile, config, workers, ties_layers, memory_limits, cores)
    return planner.plan(generation)


class _Planner:
    def __init__(
        self,
        profile: Profile,
        config: Config,
        workers: Sequence[WorkerId],
        ties_layers: LayerTies,
        memory_limits: Limits | None,
        cores: NodeCores | None,
    ) -> None:
        self.profile = profile
        self.workers = workers
        self.ties_layers = ties_layers
        self.wanted_cuts = tuple(config.pipeline.cuts)
        self.wanted_stages = config.pipeline.num_stages
        self.num_layers = len(profile.layers)
        self.num_stages = self._count_stages()
        self.limits = None if memory_limits is None else list(memory_limits)[: self.num_stages]
        self.cores = list(cores or [None] * len(workers))[: self.num_stages]
        self.schedule = config.pipeline.schedule
        self.num_microbatches = math.ceil(
            config.train.global_batch_size / config.pipeline.microbatch_size
        )
        asynchronous = is_asynchronous(self.schedule)
        updates = commit_every(self.num_stages, config.pipeline.commit_every)
        self.groups = [1] * updates if asynchronous else [self.num_microbatches]
        self.num_steps = sum(self.groups) / self.num_microbatches
        self.costs = [layer.forward_s + layer.backward_s for layer in profile.layers]
        self.memory = MemoryModel(
            profile, self.num_stages, self.schedule, sum(self.groups), num_moments(config)
        )

    def plan(self, generation: int) -> Plan:
        best, second = self._choose()
        stages = self._stages(best.cuts)
        return Plan(
            generation=generation,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            layers=tuple(layer.name for layer in self.profile.layers),
            stages=stages,
            predicted=best.predicted,
            reasons=explain(
                Choice(
                    schedule=self.schedule,
                    num_microbatches=self.num_microbatches,
                    given_stages=self.wanted_stages is not None,
                    given_cuts=bool(self.wanted_cuts),
                    balanced=not self.wanted_cuts and best.cuts == self._balanced(),
                    workers=tuple(self.workers),
                    limits=None if self.limits is None else tuple(self.limits),
                    commit_every=len(self.groups) if is_asynchronous(self.schedule) else None,
                    best=best,
                    second=second,
                )
            ),
        )

    def _count_stages(self) -> int:
        from_cuts = len(self.wanted_cuts) + 1 if self.wanted_cuts else None
        wanted = self.wanted_stages or from_cuts or len(self.workers)
        if from_cuts is not None and from_cuts != wanted:
            raise PlanError(
                f"pipeline.cuts makes {from_cuts} stages, pipeline.num_stages says {wanted}",
                "Leave out one of them",
            )
        if wanted > self.num_layers:
            raise PlanError(
                f"{wanted} stages, but the model has only {self.num_layers} layers",
                f"Set pipeline.num_stages (or the number of workers) to at most {self.num_layers}",
            )
        if wanted > len(self.workers):
            raise PlanError(
                f"{wanted} stages, but only {len(self.workers)} workers",
                f"Start {wanted} workers or set pipeline.num_stages={len(self.workers)}",
            )
        if wanted < 1:
            raise PlanError("a plan without workers", "Start at least one worker")
        return wanted

    def _choose(self) -> tuple[Candidate, Candidate | None]:
        """The plan's cuts, and the best other ones."""
        if self.wanted_cuts:
            self._check_cuts(self.wanted_cuts)
            best = self._candidate(self.wanted_cuts)
            other = self._balanced()
            return best, None if other == best.cuts else self._candidate(other)
        best = self._candidate(self._balanced())
        others = self._others(best.cuts)
        if not others:
            return best, None
        second = self._candidate(min(others, key=self._evenness))
        # The cut balances stages; only the simulation sees how their order adds up.
        if self._alone_s(second) < self._alone_s(best) * (1 - 1e-9):
            best, second = second, best
        return best, second

    def _alone_s(self, candidate: Candidate) -> float:
        """Seconds of a step if no stage shared its cores. In which turn stages get a core that they
        share is the kernel's affair: what one cut would gain by the simulated turns is not real.
        """
        if not any(self.cores):
            return candidate.predicted.step_s  # simulated so already
        return self._simulate(candidate.cuts, None).makespan_s / self.num_steps

    def _balanced(self) -> Cuts:
        return partition(
            self.costs,
            self.num_stages,
            memory=self.memory.stage_bytes,
            limits=self.limits,
        )

    def _others(self, cuts: Cuts) -> set[Cuts]:
        """Cuts one layer away, and the one that counts layers; only what fits."""
        moved = {
            (*cuts[:i], cuts[i] + step, *cuts[i + 1 :])
            for i in range(len(cuts))
            for step in (-1, 1)
        }
        equal = tuple(
            round(stage * self.num_layers / self.num_stages) for stage in range(1, self.num_stages)
        )
        return {
            other
            for other in moved | {equal}
            if other != cuts and self._is_valid(other) and self._too_big(other) is None
        }

    def _is_valid(self, cuts: Cuts) -> bool:
        edges = (0, *cuts, self.num_layers)
        return all(a < b for a, b in zip(edges, edges[1:], strict=False))

    def _check_cuts(self, cuts: Cuts) -> None:
        if not self._is_valid(cuts):
            raise PlanError(
                f"pipeline.cuts={list(cuts)} leaves a stage without layers",
                f"Cuts rise strictly and lie between 1 and {self.num_layers - 1}",
            )
        stage = self._too_big(cuts)
        if stage is not None:
            needed = self._memory_bytes(cuts)[stage]
            limit = (self.limits or [])[stage]
            raise PlanError(
                f"with pipeline.cuts={list(cuts)} stage {stage} on {self.workers[stage]} needs "
                f"{format_bytes(needed)} of {format_bytes(limit or 0)}",
                "Leave pipeline.cuts empty, use more stages or a smaller pipeline.microbatch_size",
            )

    def _too_big(self, cuts: Cuts) -> int | None:
        """The first stage that does not fit its worker."""
        if self.limits is None:
            return None
        pairs = zip(self._memory_bytes(cuts), self.limits, strict=True)
        too_big = (s for s, (need, limit) in enumerate(pairs) if limit is not None and need > limit)
        return next(too_big, None)

    def _stages(self, cuts: Cuts) -> tuple[StagePlan, ...]:
        return tuple(
            StagePlan(stage=stage, first=first, stop=stop, worker=self.workers[stage])
            for stage, (first, stop) in enumerate(_ranges(cuts, self.num_layers))
        )

    def _stage_costs(self, cuts: Cuts) -> list[float]:
        return [math.fsum(self.costs[first:stop]) for first, stop in _ranges(cuts, self.num_layers)]

    def _evenness(self, cuts: Cuts) -> tuple[float, float, Cuts]:
        costs = self._stage_costs(cuts)
        return max(costs), math.fsum(cost * cost for cost in costs), cuts

    def _candidate(self, cuts: Cuts) -> Candidate:
        """What the simulation and the memory model say of these cuts."""
        timeline = self._simulate(cuts, self.cores)
        predicted = Prediction(
            step_s=timeline.makespan_s / self.num_steps,
            bubble_ratio=timeline.bubble_ratio,
            stage_busy_s=tuple(busy / self.num_steps for busy in timeline.busy_s),
            stage_memory_bytes=self._memory_bytes(cuts),
        )
        return Candidate(cuts, predicted)

    def _simulate(self, cuts: Cuts, cores: NodeCores | None) -> Timeline:
        costs = StageCosts(self.profile, cuts)
        ties = stage_ties(self._stages(cuts), self.ties_layers)
        lists = build(self.schedule, self.num_stages, self.groups, ties=ties)
        shared = None
        if cores is not None:
            nodes = [None if found is None else found[0] for found in cores]
            shared = Cores(nodes, dict(found for found in cores if found), costs.need)
        most = [most_left(self.schedule, stage) for stage in range(self.num_stages)]
        late = Late(costs.late_s, costs.late_cpu_s, most)
        return simulate(lists, costs.duration, costs.link, shared, late)

    def _memory_bytes(self, cuts: Cuts) -> tuple[int, ...]:
        ranges = _ranges(cuts, self.num_layers)
        return tuple(self.memory.stage_bytes(a, b, stage) for stage, (a, b) in enumerate(ranges))


def _ranges(cuts: Cuts, num_layers: int) -> list[tuple[int, int]]:
    return list(zip((0, *cuts), (*cuts, num_layers), strict=True))
