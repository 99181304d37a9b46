"""Plays a schedule with durations: when each action starts and ends, and how long stages idle.

Sends are buffered and receives only post, as in the runtime, and links do not queue: a message is
there `link(send)` seconds after the end of its SEND. What backwards leave for later fills the gaps
in which a stage would wait. Stages on one node may share its cores: an action then waits, first
come first served, until one is free for the part of it that computes. Actions are played in order
of time, each once, so long segments cost linear time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from elastic_trainer.schedule.grid import format_grid

_Message = tuple[Kind, int, int, int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happened; `start_s` and `end_s` have the shape of the lists.

    `busy_s` adds up the durations of each stage's actions and what they left for later;
    `bubble_ratio` is the share of all stages' time until the last one ends in which they were not
    busy. Waiting for a core is not being busy: an action starts when it has got one.
    """

    makespan_s: float
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    bubble_ratio: float
    peak_live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cores:
    """Which stages compete for cores.

    `node` names the node of each stage, None for a stage that needs no core of any (its device
    computes). `count` is how many cores a node has. `need` says for how many of an action's
    seconds, its first ones, it keeps a core.
    """

    node: Sequence[str | None]
    count: Mapping[str, int]
    need: Callable[[Action], float]


@dataclass(frozen=True, slots=True)
class Late:
    """What each backward leaves for after its SEND_B, by stage.

    It takes `seconds`, `cpu_seconds` of them on a core. A stage does it while it would wait; at
    once, if more than the last `most` backwards have left something; and all before it steps.
    """

    seconds: Sequence[float]
    cpu_seconds: Sequence[float]
    most: Sequence[int]


# Before these, all gradients of weights must be there.
_ENDS_LATE = frozenset({Kind.REDUCE, Kind.OPT, Kind.SEND_G})


def no_delay(action: Action) -> float:
    """A link on which messages are there at once."""
    return 0.0


def simulate(
    lists: ActionLists,
    duration: Callable[[Action], float],
    link: Callable[[Action], float] = no_delay,
    cores: Cores | None = None,
    late: Late | None = None,
) -> Timeline:
    """Play complete lists (messages included).

    Args:
        lists: the actions of each stage.
        duration: seconds that an action keeps its stage busy; asked of all but RECV. REDUCE ends
            on all stages together, its duration after the last has come.
        link: seconds that the message of a SEND travels, during which both stages are free.
        cores: what stages share; None: every stage has a core of its own.
        late: what backwards leave for later; None: nothing.
    """
    return _Simulation(lists, duration, link, cores, late).run()


class _Simulation:
    def __init__(
        self,
        lists: ActionLists,
        duration: Callable[[Action], float],
        link: Callable[[Action], float],
        cores: Cores | None,
        late: Late | None,
    ) -> None:
        self.lists = lists
        self.need = cores.need if cores else no_delay
        self.free = _free_cores(cores, len(lists)) if cores else [None] * len(lists)
        self.duration = duration
        self.link = link
        self.late = late
        self.left: list[deque[float]] = [deque() for _ in lists]  # seconds, by backward
        self.now = [0.0] * len(lists)
        self.busy = [0.0] * len(lists)
        self.start: list[list[float]] = [[] for _ in lists]
        self.end: list[list[float]] = [[] for _ in lists]
        self.arrived: dict[_Message, float] = {}
        self.waiting: dict[_Message, int] = {}
        self.gradients: dict[tuple[int, int], list[_Message]] = {}
        self.reducing: dict[int, dict[int, float]] = {}
        self.ready: list[tuple[float, int]] = []  # when the next action of a stage could start

    def run(self) -> Timeline:
        for stage in range(len(self.lists)):
            self._look_ahead(stage)
        while self.ready:
            begin, stage = heapq.heappop(self.ready)
            if self._must_catch_up(stage):
                self._catch_up(stage, begin)
            else:
                self._fill(stage, begin)
                self._perform(stage, self.lists[stage][len(self.end[stage])], begin)
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

    def _look_ahead(self, stage: int) -> None:
        """Line up a stage's next action if its messages are known to come; otherwise wait for the
        first unknown one. What is left for later may have to come first.
        """
        actions, index = self.lists[stage], len(self.end[stage])
        if self._must_catch_up(stage):
            heapq.heappush(self.ready, (self.now[stage], stage))
            return
        if index == len(actions):
            return
        begin = self.now[stage]
        for message in self._needs(actions[index]):
            arrival = self.arrived.get(message)
            if arrival is None:
                self.waiting[message] = stage
                return
            begin = max(begin, arrival)
        heapq.heappush(self.ready, (begin, stage))

    def _perform(self, stage: int, action: Action, begin: float) -> None:
        """Do an action that could start at `begin`; all that could start earlier are done."""
        if action.kind is Kind.REDUCE:
            self._reduce(action, begin)
            return
        if action.kind in RECEIVES:
            self._record(stage, begin, begin, 0.0)
            if action.kind is Kind.RECV_G:
                message = (action.kind, stage, action.microbatch, action.other)
                self.gradients.setdefault((stage, action.microbatch), []).append(message)
        else:
            seconds = self.duration(action)
            begin = self._keep_core(stage, self.need(action), begin)
            self._record(stage, begin, begin + seconds, seconds)
            if action.kind in SENDS:
                self._deliver(action, begin + seconds)
            if action.kind is Kind.SEND_B and self.late and self.late.seconds[stage] > 0:
                self.left[stage].append(self.late.seconds[stage])
        self._look_ahead(stage)

    def _keep_core(self, stage: int, need: float, begin: float) -> float:
        """When what could begin then does: it keeps the core that is free first for `need` s."""
        free = self.free[stage]
        if free is None or need <= 0:
            return begin
        begin = max(begin, free[0])
        heapq.heapreplace(free, begin + need)
        return begin

    def _must_catch_up(self, stage: int) -> bool:
        left, actions, index = self.left[stage], self.lists[stage], len(self.end[stage])
        if self.late is None or not left:
            return False
        if index == len(actions) or actions[index].kind in _ENDS_LATE:
            return True
        return len(left) > self.late.most[stage]

    def _catch_up(self, stage: int, begin: float) -> None:
        """Do what the backward that has waited longest has left."""
        seconds = self.left[stage].popleft()
        begin = self._keep_core(stage, seconds * self._late_share(stage), begin)
        self.now[stage] = begin + seconds
        self.busy[stage] += seconds
        self._look_ahead(stage)

    def _fill(self, stage: int, until: float) -> None:
        """Do what fits of what is left before the next action starts.

        On shared cores it comes after whatever else started in the gap.
        """
        left, begin = self.left[stage], self.now[stage]
        if not left or until <= begin:
            return
        if (free := self.free[stage]) is not None:
            begin = max(begin, free[0])
        done = 0.0
        while left and (seconds := min(left[0], until - begin - done)) > 0:
            done += seconds
            left[0] -= seconds
            if left[0] <= 0:
                left.popleft()
        self._keep_core(stage, done * self._late_share(stage), begin)
        self.busy[stage] += done

    def _late_share(self, stage: int) -> float:
        """The part of what is left for later that needs a core."""
        assert self.late is not None
        return self.late.cpu_seconds[stage] / self.late.seconds[stage]

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

    def _reduce(self, action: Action, begin: float) -> None:
        present = self.reducing.setdefault(action.microbatch, {})
        present[action.stage] = begin
        if len(present) < len(self.lists):
            return
        own = [self.lists[stage][len(self.end[stage])] for stage in range(len(self.lists))]
        seconds = max(self.duration(reduce) for reduce in own)
        begin = max(present.values())
        for stage in range(len(self.lists)):
            self._record(stage, begin, begin + seconds, seconds)
        for stage in range(len(self.lists)):
            self._look_ahead(stage)

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
            self._look_ahead(waiter)

    def _check_done(self) -> None:
        progress = [len(done) for done in self.end]
        stuck = [s for s, actions in enumerate(self.lists) if progress[s] < len(actions)]
        if stuck:
            error = (stuck[0], progress[stuck[0]])
            place = self.lists[error[0]][error[1]]
            grid = format_grid(self.lists, progress, error)
            raise ScheduleError(f"the simulation is stuck at {place}", f"Schedule:\n{grid}")


def _free_cores(cores: Cores, num_stages: int) -> list[list[float] | None]:
    """When the cores of each stage's node are free, a heap that the stages of the node share; None
    for a stage that never waits for one.
    """
    heaps = {node: [0.0] * max(1, count) for node, count in cores.count.items()}
    crowd = [cores.node[stage] for stage in range(num_stages)]
    return [
        heaps[node] if node is not None and crowd.count(node) > len(heaps[node]) else None
        for node in crowd
    ]


def _peak_live(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        if action.kind is Kind.F:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.B:
            live -= 1
    return peak
