"""Adds SEND and RECV to lists of compute actions.

The lists are played once, a round at a time, one action per stage and round. When an action that
produces a message completes, its SEND goes to the end of the sender's list and the RECV, at the
same moment, to the end of the receiver's. All lists are therefore cuts of one global order in which
the two ends of a message stand together, and rendezvous sends cannot wait for each other in a
circle.
"""

from collections.abc import Sequence

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import Action, ActionLists, Kind
from elastic_trainer.schedule.grid import format_grid

Tie = tuple[int, int]
_Key = tuple[Kind, int, int, int]


def add_communication(compute: ActionLists, ties: Sequence[Tie] = ()) -> ActionLists:
    """The lists with every message that their compute actions need.

    Args:
        compute: F, B, REDUCE, OPT and TIE actions of each stage.
        ties: (owner stage, follower stage) of tied parameters, owner first in the pipeline.
    """
    return _Lowering(compute, ties).run()


class _Lowering:
    def __init__(self, compute: ActionLists, ties: Sequence[Tie]) -> None:
        self.compute = compute
        self.num_stages = len(compute)
        pairs = sorted(set(ties))
        stages = range(self.num_stages)
        self.owners = [[o for o, f in pairs if f == stage] for stage in stages]
        self.followers = [[f for o, f in pairs if o == stage] for stage in stages]
        # OPT j closes the update whose last microbatch is j: then tied gradients are complete.
        self.closing = [{a.microbatch for a in acts if a.kind is Kind.OPT} for acts in compute]
        self.lowered: list[list[Action]] = [[] for _ in compute]
        self.position = [0] * self.num_stages
        self.posted: set[_Key] = set()

    def run(self) -> ActionLists:
        total = sum(len(actions) for actions in self.compute)
        while sum(self.position) < total:
            if not any([self._step(stage) for stage in range(self.num_stages)]):
                self._refuse()
        return tuple(tuple(actions) for actions in self.lowered)

    def _step(self, stage: int) -> bool:
        action = self._next(stage)
        if action is None:
            return False
        if action.kind is Kind.REDUCE:
            return self._step_together(action)
        if not self._ready(action):
            return False
        self.lowered[stage].append(action)
        self.position[stage] += 1
        self._emit(action)
        return True

    def _next(self, stage: int) -> Action | None:
        actions, position = self.compute[stage], self.position[stage]
        return actions[position] if position < len(actions) else None

    def _step_together(self, action: Action) -> bool:
        everyone = [self._next(stage) for stage in range(self.num_stages)]
        wanted = (Kind.REDUCE, action.microbatch)
        if any(a is None or (a.kind, a.microbatch) != wanted for a in everyone):
            return False
        for stage, reduce in enumerate(everyone):
            assert reduce is not None
            self.lowered[stage].append(reduce)
            self.position[stage] += 1
        return True

    def _ready(self, action: Action) -> bool:
        stage, j = action.stage, action.microbatch
        match action.kind:
            case Kind.F:
                return stage == 0 or (Kind.RECV_F, stage, j, stage - 1) in self.posted
            case Kind.B:
                last = stage == self.num_stages - 1
                return last or (Kind.RECV_B, stage, j, stage + 1) in self.posted
            case Kind.OPT:
                needs = ((Kind.RECV_G, stage, j, f) for f in self.followers[stage])
                return all(key in self.posted for key in needs)
            case Kind.TIE:
                assert action.peer is not None, "TIE names the owner's stage"
                return (Kind.RECV_W, stage, j, action.peer) in self.posted
        raise ScheduleError(f"{action} is not a compute action", "Lower each schedule only once")

    def _emit(self, action: Action) -> None:
        stage, j = action.stage, action.microbatch
        match action.kind:
            case Kind.F if stage < self.num_stages - 1:
                self._send(Action(Kind.SEND_F, stage, j))
            case Kind.B:
                if stage > 0:
                    self._send(Action(Kind.SEND_B, stage, j))
                if j in self.closing[stage]:
                    for owner in self.owners[stage]:
                        self._send(Action(Kind.SEND_G, stage, j, owner))
            case Kind.OPT:
                for follower in self.followers[stage]:
                    self._send(Action(Kind.SEND_W, stage, j, follower))

    def _send(self, send: Action) -> None:
        receive = send.counterpart()
        self.lowered[send.stage].append(send)
        self.lowered[receive.stage].append(receive)
        self.posted.add((receive.kind, receive.stage, receive.microbatch, receive.other))

    def _refuse(self) -> None:
        stuck = [s for s in range(self.num_stages) if self._next(s) is not None]
        waiting = ", ".join(str(self._next(stage)) for stage in stuck)
        grid = format_grid(self.compute, self.position, (stuck[0], self.position[stuck[0]]))
        raise ScheduleError(
            f"the schedule cannot run: {waiting} wait for actions that never come",
            f"Schedule:\n{grid}",
        )
