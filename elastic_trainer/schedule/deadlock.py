"""Static deadlock check: plays lists of actions with rendezvous sends, without durations.

A SEND completes when its peer has reached the matching RECV; a RECV only posts; F, B, REDUCE, OPT
and TIE wait for their messages; REDUCE completes when every stage has reached it. No action has a
choice of partner, so one way of playing decides for all: what gets stuck here can get stuck, what
ends here always ends. The real transport buffers sends and is strictly more forgiving.
"""

from collections import deque

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from elastic_trainer.schedule.grid import format_grid

_Event = tuple[str, Kind, int, int, int]


def check_deadlock(lists: ActionLists) -> None:
    """Raise ScheduleError with the grid if the lists can get stuck."""
    replay = _Replay(lists)
    replay.run()
    stuck = [s for s, actions in enumerate(lists) if replay.position[s] < len(actions)]
    if not stuck:
        return
    waits = "; ".join(replay.describe(stage) for stage in stuck)
    first = stuck[0]
    grid = format_grid(lists, replay.position, (first, replay.position[first]))
    raise ScheduleError(f"deadlock: {waits}", f"Schedule:\n{grid}")


class _Replay:
    def __init__(self, lists: ActionLists) -> None:
        self.lists = lists
        self.position = [0] * len(lists)
        self.happened: set[_Event] = set()
        self.waiting: dict[_Event, list[int]] = {}
        self.gradients: dict[tuple[int, int], list[_Event]] = {}
        self.reducing: dict[int, set[int]] = {}
        self.runnable = deque(range(len(lists)))

    def run(self) -> None:
        while self.runnable:
            stage = self.runnable.popleft()
            actions = self.lists[stage]
            while self.position[stage] < len(actions):
                action = actions[self.position[stage]]
                missing = self._missing(action)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(stage)
                    break
                self._complete(action)
                self.position[stage] += 1

    def describe(self, stage: int) -> str:
        action = self.lists[stage][self.position[stage]]
        missing = self._missing(action)
        assert missing is not None, "a stuck stage waits for something"
        what, kind, at, j, other = missing
        if kind is Kind.REDUCE:
            return f"{action} waits for all stages"
        receive = Action(kind, at, j, None if kind in (Kind.RECV_F, Kind.RECV_B) else other)
        return f"{action} waits for {receive if what == 'posted' else receive.counterpart()}"

    def _missing(self, action: Action) -> _Event | None:
        """The first event that the action still waits for."""
        for event in self._needs(action):
            if event not in self.happened:
                return event
        return self._missing_together(action) if action.kind is Kind.REDUCE else None

    def _missing_together(self, reduce: Action) -> _Event | None:
        """A stage that has its tied gradients takes part, and waits until everybody does."""
        present = self.reducing.setdefault(reduce.microbatch, set())
        present.add(reduce.stage)
        event: _Event = ("done", Kind.REDUCE, -1, reduce.microbatch, -1)
        if len(present) == len(self.lists):
            self._happen(event)
        return None if event in self.happened else event

    def _needs(self, action: Action) -> list[_Event]:
        stage, j = action.stage, action.microbatch
        match action.kind:
            case Kind.F if stage > 0:
                return [("sent", Kind.RECV_F, stage, j, stage - 1)]
            case Kind.B if stage < len(self.lists) - 1:
                return [("sent", Kind.RECV_B, stage, j, stage + 1)]
            case Kind.OPT | Kind.REDUCE:
                return self.gradients.get((stage, j), [])
            case Kind.TIE if action.peer is not None:
                return [("sent", Kind.RECV_W, stage, j, action.peer)]
            case kind if kind in SENDS:
                receive = action.counterpart()
                return [("posted", receive.kind, receive.stage, j, stage)]
        return []

    def _complete(self, action: Action) -> None:
        stage, j = action.stage, action.microbatch
        if action.kind in RECEIVES:
            self._happen(("posted", action.kind, stage, j, action.other))
            if action.kind is Kind.RECV_G:
                sent: _Event = ("sent", action.kind, stage, j, action.other)
                self.gradients.setdefault((stage, j), []).append(sent)
        elif action.kind in SENDS:
            receive = action.counterpart()
            self._happen(("sent", receive.kind, receive.stage, j, stage))

    def _happen(self, event: _Event) -> None:
        self.happened.add(event)
        self.runnable.extend(self.waiting.pop(event, ()))
