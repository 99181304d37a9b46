"""Scripts and traces: what they say, and which line is wrong."""

from pathlib import Path

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.schedule.actions import Kind
from elastic_trainer.testing.chaos.script import (
    Drain,
    Scale,
    check_steps,
    count_from,
    parse_script,
    parse_step,
)
from elastic_trainer.testing.chaos.trace import compress, parse_trace, trace_steps
from elastic_trainer.testing.faults import Fault, FaultKind

SCRIPT = """
# what happens to a run on a bad day
kill stage=1@update=30

hang stage=any action=b microbatch=2 @update=60   # somewhere
stop worker=stage-3 @time=12.5
slow stage=0 factor=3 @update=70..90
drain node=10.0.0.3 deadline=20 @update=80
drain stage=2
scale 2:4 @time=60s
"""


def test_a_script() -> None:
    steps = parse_script(SCRIPT)
    kill, hang, stop, slow, drain, other, scale = steps
    assert kill.what == Fault(kind=FaultKind.KILL, stage=1, updates=(30, 30))
    assert (kill.text, kill.at_update, kill.at_s) == ("kill stage=1@update=30", 30, None)
    assert hang.what == Fault(kind=FaultKind.HANG, action=Kind.B, microbatch=2, updates=(60, 60))
    assert hang.any_stage and not kill.any_stage
    assert (stop.worker, stop.at_s, stop.at_update) == ("stage-3", 12.5, None)
    assert isinstance(slow.what, Fault) and slow.what.updates == (70, 90) and slow.at_update == 70
    assert [step.lethal for step in steps] == [True, True, True, False, False, False, False]
    assert drain.what == Drain(node="10.0.0.3", deadline_s=20.0) and drain.at_update == 80
    assert other.what == Drain(stage=2) and other.at_s is None
    assert scale.what == Scale(min_workers=2, max_workers=4) and scale.at_s == 60.0


def test_updates_from_the_start_on() -> None:
    text = "kill stage=1@update=+30\nslow stage=0 factor=2 @update=+5..9\nscale 2 @update=+7\n"
    kill, slow, scale, stop = count_from(parse_script(f"{text}stop stage=1 @update=8"), 100)
    assert isinstance(kill.what, Fault) and kill.what.updates == (130, 130)
    assert isinstance(slow.what, Fault) and slow.what.updates == (105, 109)
    assert [step.at_update for step in (kill, slow, scale, stop)] == [130, 105, 107, 8]
    endless = parse_step("slow stage=0 factor=2 @update=+5..")
    (endless,) = count_from([endless], 100)
    assert isinstance(endless.what, Fault) and endless.what.updates == (105, None)


def test_a_hang_that_ends_is_not_lethal() -> None:
    assert not parse_step("hang stage=1 seconds=2").lethal


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("explode stage=1", "`explode` is no event. Events are kill, stop, hang"),
        ("kill", "kill of what?. Add stage=NUMBER, stage=any or worker=NAME."),
        ("kill stage=1 worker=stage-1", "a stage or a worker, not both"),
        ("kill stage=1 @update=x", "`update=x` cannot be read"),
        ("kill stage=1 @update=5 @time=5", "at a time or at an update, not both"),
        ("kill stage=1 @time=soon", "`time=soon` cannot be read"),
        ("kill stage=1 @time=-1", "`time=-1` cannot be read"),
        ("kill stage=1 @time=1 @time=2", "time is said twice"),
        ("kill stage=1 when=3", "a fault has no `when`"),
        ("drain", "drain what?"),
        ("drain node=", "`node=` cannot be drained"),
        ("drain node=a stage=1", "drain what? `node=a stage=1`"),
        ("drain node=a deadline=x", "`deadline=x` cannot be read"),
        ("drain node=a @update=0", "`update=0` cannot be read"),
        ("scale", "scale to what?"),
        ("scale 0", "A run needs at least one worker"),
        ("scale 4:2", "The fewest come first: 2:4"),
        ("scale many", "Write a number such as 4, or MIN:MAX"),
        ("scale nodes=4", "scale has no `nodes`"),
    ],
)
def test_a_wrong_line_is_named(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_script(f"# first\nkill stage=0\n{line}\nkill stage=1\n", "faults.txt")
    assert str(caught.value).startswith("faults.txt, line 3: ") and said in str(caught.value)


def test_an_empty_script() -> None:
    with pytest.raises(ConfigError, match="faults.txt holds no event"):
        parse_script("\n# nothing\n", "faults.txt")


NODES = {"stage-0": "10.0.0.1", "stage-1": "10.0.0.2"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kill stage=0 @update=10", "the run is at update 10 already"),
        ("scale 2 @update=101", "the run ends at update 100"),
        ("kill worker=stage-7", "there is no worker stage-7. Workers: stage-0, stage-1."),
        ("drain worker=stage-7", "there is no worker stage-7"),
        ("drain node=10.0.0.9", "no worker on 10.0.0.9. Nodes: 10.0.0.1, 10.0.0.2."),
    ],
)
def test_what_cannot_happen_is_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_steps([parse_step(line)], update=10, total=100, nodes=NODES)
    assert said in str(caught.value)
    fine = parse_script("kill stage=0 @update=11\ndrain node=10.0.0.2\nscale 2 @update=5")
    check_steps(fine, update=10, total=100, nodes=NODES)


TRACE = """\
480000,add,node1
480000,add,node2
480000,add,node3
540000,remove,node2
600000,add,node4
600000,add,node2
700000,remove,node1
700000,remove,node3
"""


def test_a_trace() -> None:
    changes = parse_trace(TRACE)
    assert [(c.at_s, c.added, c.removed) for c in changes] == [
        (480, ("node1", "node2", "node3"), ()),
        (540, (), ("node2",)),
        (600, ("node4", "node2"), ()),
        (700, (), ("node1", "node3")),
    ]
    assert [c.at_s for c in compress(changes, 60)] == [0.0, 1.0, 2.0, pytest.approx(220 / 60)]


def test_nodes_that_come_and_go_at_one_instant() -> None:
    (only,) = parse_trace("1,add,a\n1,add,b\n1,remove,a\n")
    assert (only.added, only.removed) == (("b",), ())
    _, again = parse_trace("1,add,a\n2,remove,a\n2,add,a\n")
    assert (again.added, again.removed) == (("a",), ("a",))


def test_a_trace_on_a_run_of_two_to_four_workers() -> None:
    steps = trace_steps(compress(parse_trace(TRACE), 60), 2, 4)
    assert [(round(step.at_s or 0, 2), step.text) for step in steps] == [
        (0, "scale 2:3: node1, node2, node3 added"),
        (1, "kill: node2 removed"),
        (1, "scale 2:2: node2 removed"),
        (2, "scale 2:4: node4, node2 added"),
        (3.67, "kill: node1, node3 removed"),
        (3.67, "kill: node1, node3 removed"),
        (3.67, "scale 2:2: node1, node3 removed"),
    ]
    assert all(step.any_stage for step in steps if isinstance(step.what, Fault))


def test_nodes_that_are_replaced_at_once() -> None:
    """The workers on them are killed all the same."""
    steps = trace_steps(parse_trace("0,add,a\n0,add,b\n5,remove,a\n5,add,c\n"), 1, 2)
    assert [step.text for step in steps] == ["scale 1:2: a, b added", "kill: c added; a removed"]


def test_a_trace_with_more_nodes_than_the_run_may_have_workers() -> None:
    """At most four nodes: two stand for a worker."""
    text = "".join(f"{i},add,n{i}\n" for i in range(4))
    text += "".join(f"{10 + i},remove,n{i}\n" for i in range(4))
    steps = trace_steps(parse_trace(text), 1, 2)
    assert [(step.at_s, step.text) for step in steps] == [
        (0.0, "scale 1:1: n0 added"),
        (0.002, "scale 1:2: n2 added"),
        (0.011, "kill: n1 removed"),
        (0.011, "scale 1:1: n1 removed"),
    ]


def test_the_recorded_trace() -> None:
    text = (Path(__file__).parents[2] / "data" / "aws-p3-spot.csv").read_text()
    changes = compress(parse_trace(text, "aws-p3-spot.csv"), 60)
    assert sum(len(c.added) + len(c.removed) for c in changes) == 344
    steps = trace_steps(changes, 2, 8)
    limits = [step.what.max_workers for step in steps if isinstance(step.what, Scale)]
    assert max(limits) == 8 and min(limits) < 4
    assert sum(step.any_stage for step in steps) > 30 and 600 < (steps[-1].at_s or 0) < 700


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("500000,add", "`500000,add` has not three columns"),
        ("500000,add,", "has not three columns"),
        ("soon,add,node9", "`soon` is no number of milliseconds"),
        ("500000,join,node9", "`join` is neither add nor remove"),
        ("400000,add,node9", "time goes backwards"),
        ("500000,add,node1", "node1 is there already"),
        ("500000,remove,node9", "node9 is not there"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: str, said: str) -> None:
    text = "".join(f"{line}\n" for line in [*TRACE.splitlines()[:3], line])
    with pytest.raises(ConfigError) as caught:
        parse_trace(text, "spot.csv")
    assert str(caught.value).startswith("spot.csv, line 4: ") and said in str(caught.value)


def test_an_empty_trace_and_a_wrong_speedup() -> None:
    with pytest.raises(ConfigError, match="spot.csv holds no event"):
        parse_trace("", "spot.csv")
    for speedup in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--speedup"):
            compress(parse_trace(TRACE), speedup)
