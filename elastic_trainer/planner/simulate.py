"""Plays a schedule with durations: when each action starts and ends, and how long stages idle.

Sends are buffered and receives only post, as in the runtime, and links do not queue: a message is
there `link(send)` seconds after its SEND has ended. Each action is visited once, so long segments
cost linear time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from elastic_trainer.schedule.grid import format_grid

_Message = tuple[Kind, int, int, int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happened; `start_s` and `end_s` have the shape of the lists.

    `busy_s` adds up the durations of each stage's actions; `bubble_ratio` is the share of all
    stages' time until the last one ends in which they were not busy.
    """

    makespan_s: float
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    bubble_ratio: float
    peak_live: tuple[int, ...]


def no_delay(action: Action) -> float:
    """A link on which messages are there at once."""
    return 0.0


def simulate(
    lists: ActionLists,
    duration: Callable[[Action], float],
    link: Callable[[Action], float] = no_delay,
) -> Timeline:
    """Play complete lists (messages included).

    Args:
        lists: the actions of each stage.
        duration: seconds that an action keeps its stage busy; asked of all but RECV. REDUCE ends
            on all stages together, its duration after the last has come.
        link: seconds that the message of a SEND travels, during which both stages are free.
    """
    return _Simulation(lists, duration, link).run()


class _Simulation:
    def __init__(
        self,
        lists: ActionLists,
        duration: Callable[[Action], float],
        link: Callable[[Action], float],
    ) -> None:
        self.lists = lists
        self.duration = duration
        self.link = link
        self.now = [0.0] * len(lists)
        self.busy = [0.0] * len(lists)
        self.start: list[list[float]] = [[] for _ in lists]
        self.end: list[list[float]] = [[] for _ in lists]
        self.arrived: dict[_Message, float] = {}
        self.waiting: dict[_Message, int] = {}
        self.gradients: dict[tuple[int, int], list[_Message]] = {}
        self.reducing: dict[int, dict[int, float]] = {}
        self.runnable = deque(range(len(lists)))

    def run(self) -> Timeline:
        while self.runnable:
            stage = self.runnable.popleft()
            actions = self.lists[stage]
            while len(self.end[stage]) < len(actions):
                if not self._perform(stage, actions[len(self.end[stage])]):
                    break
        self._check_done()
        makespan = max(self.now, default=0.0)
        total = makespan * len(self.lists)
        return Timeline(
            makespan_s=makespan,
            start_s=tuple(map(tuple, self.start)),
            end_s=tuple(map(tuple, self.end)),
            busy_s=tuple(self.busy),
            bubble_ratio=1.0 - sum(self.busy) / total if total else 0.0,
            peak_live=tuple(_peak_live(actions) for actions in self.lists),
        )

    def _perform(self, stage: int, action: Action) -> bool:
        """Do an action if its messages are known to come; otherwise wait for the first unknown."""
        begin = self.now[stage]
        for message in self._needs(action):
            arrival = self.arrived.get(message)
            if arrival is None:
                self.waiting[message] = stage
                return False
            begin = max(begin, arrival)
        if action.kind is Kind.REDUCE:
            return self._reduce(action, begin)
        if action.kind in RECEIVES:
            self._record(stage, begin, begin, 0.0)
            if action.kind is Kind.RECV_G:
                message = (action.kind, stage, action.microbatch, action.other)
                self.gradients.setdefault((stage, action.microbatch), []).append(message)
            return True
        seconds = self.duration(action)
        self._record(stage, begin, begin + seconds, seconds)
        if action.kind in SENDS:
            self._deliver(action, begin + seconds)
        return True

    def _needs(self, action: Action) -> list[_Message]:
        stage, j = action.stage, action.microbatch
        match action.kind:
            case Kind.F if stage > 0:
                return [(Kind.RECV_F, stage, j, stage - 1)]
            case Kind.B if stage < len(self.lists) - 1:
                return [(Kind.RECV_B, stage, j, stage + 1)]
            case Kind.OPT | Kind.REDUCE:
                return self.gradients.get((stage, j), [])
            case Kind.TIE if action.peer is not None:
                return [(Kind.RECV_W, stage, j, action.peer)]
        return []

    def _reduce(self, action: Action, begin: float) -> bool:
        present = self.reducing.setdefault(action.microbatch, {})
        present[action.stage] = begin
        if len(present) < len(self.lists):
            return False
        own = [self.lists[stage][len(self.end[stage])] for stage in range(len(self.lists))]
        seconds = max(self.duration(reduce) for reduce in own)
        begin = max(present.values())
        for stage in range(len(self.lists)):
            self._record(stage, begin, begin + seconds, seconds)
            if stage != action.stage:
                self.runnable.append(stage)
        return True

    def _record(self, stage: int, begin: float, end: float, seconds: float) -> None:
        self.start[stage].append(begin)
        self.end[stage].append(end)
        self.now[stage] = end
        self.busy[stage] += seconds

    def _deliver(self, send: Action, sent_at: float) -> None:
        receive = send.counterpart()
        message = (receive.kind, receive.stage, receive.microbatch, receive.other)
        self.arrived[message] = sent_at + self.link(send)
        waiter = self.waiting.pop(message, None)
        if waiter is not None:
            self.runnable.append(waiter)

    def _check_done(self) -> None:
        progress = [len(done) for done in self.end]
        stuck = [s for s, actions in enumerate(self.lists) if progress[s] < len(actions)]
        if stuck:
            error = (stuck[0], progress[stuck[0]])
            place = self.lists[error[0]][error[1]]
            grid = format_grid(self.lists, progress, error)
            raise ScheduleError(f"the simulation is stuck at {place}", f"Schedule:\n{grid}")


def _peak_live(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        if action.kind is Kind.F:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.B:
            live -= 1
    return peak
