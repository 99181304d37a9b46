"""Checks a schedule before anything starts, and counts what it will need.

Checked, in this order: every stage has exactly the actions that training needs; each stage's order
respects what an action depends on; each forward runs on the weights it should (nothing late when
synchronous, exactly min(j, P-1-s) updates late when asynchronous; one version of a tied weight
everywhere); the lists cannot deadlock, even with rendezvous sends.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NoReturn

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from elastic_trainer.schedule.deadlock import check_deadlock
from elastic_trainer.schedule.grid import format_grid
from elastic_trainer.schedule.lower import Tie

_Key = tuple[Kind, int, int]
_NOBODY = -1
_TIED = frozenset({Kind.SEND_G, Kind.RECV_G, Kind.SEND_W, Kind.RECV_W, Kind.TIE})


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """What a valid schedule needs, per stage.

    `peak_live` counts microbatches between their forward and their backward, `staleness` the
    updates that each microbatch's gradient is late, `ring_size` the versions of the weights alive
    at once, the newest included.
    """

    peak_live: tuple[int, ...]
    staleness: tuple[tuple[int, ...], ...]
    ring_size: tuple[int, ...]
    num_updates: int


def validate(
    lists: ActionLists,
    num_stages: int,
    groups: Sequence[int],
    *,
    asynchronous: bool,
    ties: Sequence[Tie] | None = None,
    reduce: bool | None = None,
) -> ScheduleFacts:
    """Raise ScheduleError, with the place marked in the grid, unless the lists train rightly.

    Args:
        lists: complete lists, messages included.
        num_stages: stages of the pipeline.
        groups: microbatches of each update, in order.
        asynchronous: whether gradients must be P-1-s updates late, or not at all.
        ties: (owner stage, follower stage) pairs that must be there; None takes those that occur.
        reduce: whether REDUCE must be there; None takes what occurs.
    """
    check = _Check(lists, num_stages, groups)
    check.pairs = sorted(check.pairs if ties is None else {*check.pairs, *ties})
    if reduce is not None:
        check.reduce = reduce
    check.completeness()
    for stage in range(num_stages):
        check.order(stage)
    staleness = tuple(check.staleness(stage, asynchronous) for stage in range(num_stages))
    check.tied_versions()
    check_deadlock(lists)
    counts = [_count(actions) for actions in lists]
    return ScheduleFacts(
        peak_live=tuple(live for live, _ in counts),
        staleness=staleness,
        ring_size=tuple(ring for _, ring in counts),
        num_updates=len(groups),
    )


def validate_forward_only(lists: ActionLists, num_stages: int, num_microbatches: int) -> None:
    """Raise ScheduleError, with the place marked in the grid, unless the lists evaluate rightly."""
    check = _Check(lists, num_stages, [num_microbatches], training=False)
    check.completeness()
    for stage in range(num_stages):
        check.order(stage)
    check_deadlock(lists)


def _count(actions: Sequence[Action]) -> tuple[int, int]:
    """Most microbatches alive at once, and most versions of the weights."""
    version = peak = 0
    ring = 1
    live: dict[int, int] = {}
    users: Counter[int] = Counter()
    for action in actions:
        if action.kind is Kind.F:
            live[action.microbatch] = version
            users[version] += 1
            peak = max(peak, len(live))
        elif action.kind is Kind.B:
            used = live.pop(action.microbatch)
            users[used] -= 1
            if not users[used]:
                del users[used]
        elif action.kind is Kind.OPT:
            version += 1
            ring = max(ring, len(users) + (version not in users))
    return peak, ring


class _Check:
    def __init__(
        self,
        lists: ActionLists,
        num_stages: int,
        groups: Sequence[int],
        *,
        training: bool = True,
    ) -> None:
        self.lists = lists
        self.num_stages = num_stages
        self.training = training
        self.stops = list(accumulate(groups))
        self.starts = [stop - count for stop, count in zip(self.stops, groups, strict=True)]
        self.num_microbatches = self.stops[-1] if self.stops else 0
        if len(lists) != num_stages:
            raise ScheduleError(f"{len(lists)} lists of actions for {num_stages} stages")
        if not groups or min(groups) < 1:
            raise ScheduleError(f"{list(groups)} microbatches per update", "Each needs one or more")
        self.pairs = sorted(self._find_pairs())
        self.reduce = any(a.kind is Kind.REDUCE for actions in lists for a in actions)
        self.index: list[dict[_Key, int]] = []

    def refuse(self, stage: int, index: int, message: str) -> NoReturn:
        grid = format_grid(self.lists, error=(stage, index))
        raise ScheduleError(f"stage {stage}, action {index}: {message}", f"Schedule:\n{grid}")

    def _find_pairs(self) -> set[Tie]:
        pairs: set[Tie] = set()
        for stage, actions in enumerate(self.lists):
            for index, action in enumerate(actions):
                if action.kind not in _TIED:
                    continue
                if action.peer is None:
                    self.refuse(stage, index, f"{action} does not name the other stage")
                owning = action.kind in (Kind.RECV_G, Kind.SEND_W)
                owner, follower = (stage, action.peer) if owning else (action.peer, stage)
                if not 0 <= owner < follower < self.num_stages:
                    self.refuse(stage, index, f"{action} ties stages {owner} and {follower}")
                pairs.add((owner, follower))
        return pairs

    def _expected(self, stage: int) -> set[_Key]:
        """Every action that the stage must have, once each."""
        before, after = stage > 0, stage < self.num_stages - 1
        each = [(Kind.F, _NOBODY)]
        each += [(Kind.RECV_F, stage - 1)] if before else []
        each += [(Kind.SEND_F, stage + 1)] if after else []
        if not self.training:
            return {(k, j, other) for j in range(self.num_microbatches) for k, other in each}
        each.append((Kind.B, _NOBODY))
        each += [(Kind.SEND_B, stage - 1)] if before else []
        each += [(Kind.RECV_B, stage + 1)] if after else []
        once = [(Kind.OPT, _NOBODY)]
        once += [(Kind.REDUCE, _NOBODY)] if self.reduce else []
        for owner, follower in self.pairs:
            if owner == stage:
                once += [(Kind.RECV_G, follower), (Kind.SEND_W, follower)]
            if follower == stage:
                once += [(Kind.SEND_G, owner), (Kind.RECV_W, owner), (Kind.TIE, owner)]
        keys = {(kind, j, other) for j in range(self.num_microbatches) for kind, other in each}
        return keys | {(kind, stop - 1, other) for stop in self.stops for kind, other in once}

    def completeness(self) -> None:
        for stage, actions in enumerate(self.lists):
            expected = self._expected(stage)
            index: dict[_Key, int] = {}
            for i, action in enumerate(actions):
                key = _key(action)
                if action.stage != stage:
                    self.refuse(stage, i, f"{action} belongs to another stage")
                if key in index:
                    self.refuse(stage, i, f"{action} stands here twice")
                if key not in expected:
                    self.refuse(stage, i, f"{action} has no place in this schedule")
                index[key] = i
            missing = sorted(expected - index.keys(), key=lambda k: (k[1], k[0], k[2]))
            if missing:
                self.refuse(stage, len(actions), _missing_message(stage, missing[0]))
            self.index.append(index)

    def order(self, stage: int) -> None:
        index = self.index[stage]
        for earlier, later in self._constraints(stage):
            if index[earlier] > index[later]:
                first, second = (self.lists[stage][index[k]] for k in (later, earlier))
                self.refuse(stage, index[later], f"{first} must come after {second}")

    def _constraints(self, stage: int) -> Iterator[tuple[_Key, _Key]]:
        """Pairs of actions of one stage that must stand in this order."""
        before, after = stage - 1, stage + 1
        for j in range(self.num_microbatches):
            forward, backward = (Kind.F, j, _NOBODY), (Kind.B, j, _NOBODY)
            if stage > 0:
                yield (Kind.RECV_F, j, before), forward
            if after < self.num_stages:
                yield forward, (Kind.SEND_F, j, after)
            if not self.training:
                continue
            yield forward, backward
            if stage > 0:
                yield backward, (Kind.SEND_B, j, before)
            if after < self.num_stages:
                yield (Kind.RECV_B, j, after), backward
        if self.training:
            yield from self._update_constraints(stage)

    def _update_constraints(self, stage: int) -> Iterator[tuple[_Key, _Key]]:
        # Gradients are added up in the order of the microbatches: backwards must not overtake.
        for i, j in pairwise(range(self.num_microbatches)):
            yield (Kind.B, i, _NOBODY), (Kind.B, j, _NOBODY)
        for start, stop in zip(self.starts, self.stops, strict=True):
            j = stop - 1
            update = (Kind.OPT, j, _NOBODY)
            closed = (Kind.REDUCE, j, _NOBODY) if self.reduce else update
            yield (Kind.B, j, _NOBODY), closed
            yield closed, update
            if start > 0:
                yield (Kind.OPT, start - 1, _NOBODY), (Kind.B, start, _NOBODY)
            for owner, follower in self.pairs:
                if follower == stage:
                    yield (Kind.B, j, _NOBODY), (Kind.SEND_G, j, owner)
                    yield (Kind.SEND_G, j, owner), closed
                    yield (Kind.RECV_W, j, owner), (Kind.TIE, j, owner)
                    if start > 0:
                        yield (Kind.TIE, start - 1, owner), (Kind.TIE, j, owner)
                if owner == stage:
                    yield (Kind.RECV_G, j, follower), closed
                    yield update, (Kind.SEND_W, j, follower)

    def staleness(self, stage: int, asynchronous: bool) -> tuple[int, ...]:
        """Updates between each microbatch's forward and the update that applies its gradient."""
        update_of = [u for u, (a, b) in enumerate(self._ranges()) for _ in range(a, b)]
        delays = [0] * self.num_microbatches
        updates = 0
        for index, action in enumerate(self.lists[stage]):
            j = action.microbatch
            if action.kind is Kind.OPT:
                updates += 1
            elif action.kind is Kind.F:
                delays[j] = update_of[j] - updates
                wanted = min(j, self.num_stages - 1 - stage) if asynchronous else 0
                if delays[j] != wanted:
                    late = f"its gradient is {delays[j]} updates late, not {wanted}"
                    self.refuse(stage, index, f"{action} runs on the wrong weights: {late}")
        return tuple(delays)

    def tied_versions(self) -> None:
        """Each forward of a follower must run on the version of the owner's forward."""
        for owner, follower in self.pairs:
            wanted = self._versions(owner, Kind.OPT, None)
            got = self._versions(follower, Kind.TIE, owner)
            for j, (version, expected) in enumerate(zip(got, wanted, strict=True)):
                if version != expected:
                    self.refuse(
                        follower,
                        self.index[follower][Kind.F, j, _NOBODY],
                        f"{follower}F{j} runs on version {version} of the weights tied to stage "
                        f"{owner}, which runs it on {expected}",
                    )

    def _versions(self, stage: int, kind: Kind, peer: int | None) -> list[int]:
        versions = [0] * self.num_microbatches
        current = 0
        for action in self.lists[stage]:
            if action.kind is Kind.F:
                versions[action.microbatch] = current
            elif action.kind is kind and action.peer == peer:
                current += 1
        return versions

    def _ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.stops, strict=True)


def _key(action: Action) -> _Key:
    if action.kind in SENDS or action.kind in RECEIVES:
        return action.kind, action.microbatch, action.other
    return action.kind, action.microbatch, _NOBODY if action.peer is None else action.peer


def _missing_message(stage: int, key: _Key) -> str:
    kind, j, other = key
    neighbour = kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    action = Action(kind, stage, j, None if neighbour or other == _NOBODY else other)
    if kind in SENDS or kind in RECEIVES:
        return f"{action} is missing, which belongs to {action.counterpart()}"
    return f"{action} is missing"
