"""Sets of hooks that change while a segment runs."""

from elastic_trainer.pipeline.hooks import HookSet, RuntimeHooks
from elastic_trainer.schedule.actions import Action
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.transport.channel import Tag

SEGMENT = Segment(
    generation=1, index=0, kind="train", batches=(), actions=((Action.parse("0F0"),),), schedule=""
)
ACTION = Action.parse("0F0")
TAG = Tag(1, "F", 1, 0)


def noting(name: str, said: list[str], sends: bool = True) -> RuntimeHooks:
    def asked(peer: str, tag: Tag) -> bool:
        said.append(f"{name} sends")
        return sends

    return RuntimeHooks(
        begin=lambda stage, segment: said.append(f"{name} begin {stage}"),
        before=lambda action: said.append(f"{name} before {action}"),
        pace=lambda action, spent_s: said.append(f"{name} pace {spent_s}"),
        after=lambda action: said.append(f"{name} after {action}"),
        sends=asked,
    )


def act(hooks: HookSet) -> bool:
    hooks.before(ACTION)
    hooks.pace(ACTION, lambda: 0.5)
    hooks.after(ACTION)
    return hooks.sends("stage-1", TAG)


def test_without_hooks_nothing_happens() -> None:
    hooks = HookSet()
    hooks.begin(0, SEGMENT)
    assert act(hooks)
    hooks = HookSet(RuntimeHooks())
    hooks.begin(0, SEGMENT)
    assert act(hooks)


def test_all_are_called_and_one_refusal_is_enough() -> None:
    said: list[str] = []
    hooks = HookSet(noting("a", said))
    hooks.put("b", noting("b", said, sends=False))
    assert act(hooks) and said == []  # no segment has begun
    hooks.begin(2, SEGMENT)
    assert not act(hooks)
    assert said == [
        "a begin 2",
        "b begin 2",
        "a before 0F0",
        "b before 0F0",
        "a pace 0.5",
        "b pace 0.5",
        "a after 0F0",
        "b after 0F0",
        "a sends",
        "b sends",
    ]


def test_hooks_that_come_while_a_segment_runs() -> None:
    """They learn of it, and are called from the next action on."""
    said: list[str] = []
    hooks = HookSet()
    hooks.begin(2, SEGMENT)
    hooks.before(ACTION)
    hooks.put("late", noting("late", said))
    hooks.after(ACTION)
    assert said == ["late begin 2", "late after 0F0"]
    hooks.put("late", None)
    said.clear()
    act(hooks)
    hooks.begin(2, SEGMENT)
    act(hooks)
    assert said == []


def test_hooks_of_one_name_are_replaced() -> None:
    said: list[str] = []
    hooks = HookSet()
    hooks.begin(0, SEGMENT)
    hooks.put("x", noting("old", said))
    hooks.put("x", noting("new", said))
    hooks.before(ACTION)
    assert said == ["old begin 0", "new begin 0", "new before 0F0"]
