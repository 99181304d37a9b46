"""Generators of schedules: GPipe, 1F1B and asynchronous 1F1B.

A generator decides only the order of compute actions; `lower.add_communication` adds the messages.
Where OPT stands decides whether a schedule is synchronous (after all backwards of a batch) or
asynchronous (after each backward).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import Action, ActionLists, Kind
from elastic_trainer.schedule.lower import Tie, add_communication

ASYNCHRONOUS = frozenset({"async_1f1b"})


def is_asynchronous(name: str) -> bool:
    """Whether the schedule updates after each microbatch."""
    return name in ASYNCHRONOUS


def delay(stage: int, num_stages: int) -> int:
    """Updates by which an asynchronous stage applies its gradients late, once the pipe is full."""
    return num_stages - 1 - stage


def most_left(name: str, stage: int) -> int:
    """Backwards of which a stage may leave the gradients of weights for later, see `actions`.

    As many as there are stages before it: under 1F1B, together with its own activations in flight,
    those of P microbatches, as many as the first stage holds. An asynchronous stage updates after
    each backward.
    """
    return 0 if is_asynchronous(name) else stage


def build(
    name: str,
    num_stages: int,
    groups: Sequence[int],
    *,
    ties: Sequence[Tie] = (),
    reduce: bool = False,
) -> ActionLists:
    """The complete lists of one segment.

    Args:
        name: gpipe, 1f1b or async_1f1b.
        num_stages: stages of the pipeline.
        groups: microbatches of each update, in order; all 1 when asynchronous.
        ties: (owner stage, follower stage) of parameters tied across stages.
        reduce: whether stages exchange norms before each step (synchronous only).
    """
    _check(name, num_stages, groups, ties, reduce)
    return _build(name, num_stages, tuple(groups), tuple(sorted(set(ties))), reduce)


@lru_cache(maxsize=8)
def _build(
    name: str, num_stages: int, groups: tuple[int, ...], pairs: tuple[Tie, ...], reduce: bool
) -> ActionLists:
    # Segments of a run have few shapes, and the same one over and over: hence the cache.
    compute: list[tuple[Action, ...]] = []
    for stage in range(num_stages):
        owners = [o for o, f in pairs if f == stage]
        if is_asynchronous(name):
            compute.append(_asynchronous_stage(stage, num_stages, len(groups), owners))
        else:
            order = _ORDERS[name]
            compute.append(_synchronous_stage(order, stage, num_stages, groups, owners, reduce))
    return add_communication(compute, pairs)


def forward_only(num_stages: int, num_microbatches: int) -> ActionLists:
    """Lists that only evaluate."""
    _check("gpipe", num_stages, [num_microbatches], (), False)
    forwards = [
        tuple(Action(Kind.F, stage, j) for j in range(num_microbatches))
        for stage in range(num_stages)
    ]
    return add_communication(forwards)


def _gpipe(stage: int, num_stages: int, first: int, count: int) -> list[Action]:
    microbatches = range(first, first + count)
    return [Action(kind, stage, j) for kind in (Kind.F, Kind.B) for j in microbatches]


def _one_forward_one_backward(stage: int, num_stages: int, first: int, count: int) -> list[Action]:
    forwards = [Action(Kind.F, stage, j) for j in range(first, first + count)]
    backwards = [Action(Kind.B, stage, j) for j in range(first, first + count)]
    warm_up = min(num_stages - 1 - stage, count)
    steady = [a for pair in zip(forwards[warm_up:], backwards, strict=False) for a in pair]
    return forwards[:warm_up] + steady + backwards[count - warm_up :]


_Order = Callable[[int, int, int, int], list[Action]]
_ORDERS: dict[str, _Order] = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}


def _synchronous_stage(
    order: _Order,
    stage: int,
    num_stages: int,
    groups: Sequence[int],
    owners: Sequence[int],
    reduce: bool,
) -> tuple[Action, ...]:
    actions: list[Action] = []
    first = 0
    for count in groups:
        last = first + count - 1
        actions += order(stage, num_stages, first, count)
        if reduce:
            actions.append(Action(Kind.REDUCE, stage, last))
        actions.append(Action(Kind.OPT, stage, last))
        actions += [Action(Kind.TIE, stage, last, owner) for owner in owners]
        first += count
    return tuple(actions)


def _asynchronous_stage(
    stage: int, num_stages: int, count: int, owners: Sequence[int]
) -> tuple[Action, ...]:
    """Warm-up, then F B OPT, then the drain.

    A tied weight has one version for all its holders, the owner's: the owner's F j runs after its
    OPT j-1-d, d being the owner's delay, so the follower installs those weights right before its
    own F j. What is left is installed at the end of the segment.
    """
    actions: list[Action] = []
    delays = {owner: delay(owner, num_stages) for owner in owners}

    def forward(j: int) -> None:
        for owner, late in delays.items():
            if j - 1 - late >= 0:
                actions.append(Action(Kind.TIE, stage, j - 1 - late, owner))
        actions.append(Action(Kind.F, stage, j))

    def backward(j: int) -> None:
        actions.append(Action(Kind.B, stage, j))
        actions.append(Action(Kind.OPT, stage, j))

    warm_up = min(delay(stage, num_stages), count)
    for j in range(warm_up):
        forward(j)
    for j in range(warm_up, count):
        forward(j)
        backward(j - warm_up)
    for j in range(count - warm_up, count):
        backward(j)
    rest = [(i, o) for o, late in delays.items() for i in range(max(0, count - 1 - late), count)]
    actions += [Action(Kind.TIE, stage, i, owner) for i, owner in sorted(rest)]
    return tuple(actions)


def _check(
    name: str, num_stages: int, groups: Sequence[int], ties: Sequence[Tie], reduce: bool
) -> None:
    if name not in _ORDERS and name not in ASYNCHRONOUS:
        known = ", ".join(sorted({*_ORDERS, *ASYNCHRONOUS}))
        raise ScheduleError(f"there is no schedule {name!r}", f"Schedules are {known}")
    if num_stages < 1:
        raise ScheduleError(f"a schedule of {num_stages} stages", "It needs at least one stage")
    if not groups or min(groups) < 1:
        raise ScheduleError(
            f"a schedule of {list(groups)} microbatches per update",
            "It needs at least one update, and each at least one microbatch",
        )
    for owner, follower in ties:
        if not 0 <= owner < follower < num_stages:
            raise ScheduleError(
                f"stages {owner} and {follower} of {num_stages} cannot be tied",
                "The owner of a tied parameter stands before its followers",
            )
    if is_asynchronous(name) and (reduce or max(groups) > 1):
        raise ScheduleError(
            f"{name} updates after each microbatch, alone on each stage",
            "Ask for groups of one microbatch and no exchange of norms, or for 1f1b",
        )
