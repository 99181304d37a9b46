"""Faults on purpose: at this action of this stage, so often, the same in every repetition.

    injector = Injector(Fault.parse("hang stage=1 action=B microbatch=2 @update=30"))
    InProcessPipeline(..., hooks={1: injector.hooks})     # in one process
    worker.inject("my fault", injector.hooks)             # on a StageWorker that runs

| kind | what happens, on the compute thread | needs |
|---|---|---|
| kill | SIGKILL of its own process | |
| stop | SIGSTOP of its own process: it answers nobody, and looks alive to the kernel | |
| hang | the compute thread stands still, the process still answers | seconds, else for ever |
| gil | the same, and no other thread of the process may run Python | seconds |
| error | the action raises `InjectedError` | |
| slow | the action takes longer, by a factor or by seconds | factor or seconds |
| drop | a message is lost | |
| delay | a message leaves later, and the stage waits as long | seconds |

A fault that names no action happens at the first one of its update. Of drop and delay, the action
is a SEND or REDUCE. Evaluations are left alone.
"""

import ctypes
import hashlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import WorkerId

if TYPE_CHECKING:
    from elastic_trainer.transport.channel import Tag


class FaultKind(StrEnum):
    """What happens."""

    KILL = "kill"
    STOP = "stop"
    HANG = "hang"
    GIL = "gil"
    ERROR = "error"
    SLOW = "slow"
    DROP = "drop"
    DELAY = "delay"


LETHAL = frozenset({FaultKind.KILL, FaultKind.STOP, FaultKind.HANG})
"""The worker must be replaced: it is gone, or will not go on by itself."""

_MESSAGES = frozenset({FaultKind.DROP, FaultKind.DELAY})
_TIMED = frozenset({FaultKind.GIL, FaultKind.DELAY})
_PER_MICROBATCH = frozenset(
    {Kind.F, Kind.B, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B},
)
_KIND_OF = {
    "F": Kind.SEND_F,
    "B": Kind.SEND_B,
    "G": Kind.SEND_G,
    "W": Kind.SEND_W,
    "N": Kind.REDUCE,
}
_SEPARATORS = re.compile(r"[\s,@]+")


class InjectedError(ElasticTrainerError):
    """What a fault of kind `error` raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and its address; whatever is None fits everything.

    Attributes:
        stage: index in the plan; None: the stage whose hooks these are.
        updates: first and last update; the last may be None, for ever.
        microbatch: index within its batch.
        count: how often it happens at most; None: whenever it fits.
        probability: with which it happens where it fits.
    """

    kind: FaultKind
    stage: int | None = None
    action: Kind | None = None
    updates: tuple[int, int | None] | None = None
    microbatch: int | None = None
    count: int | None = 1
    probability: float = 1.0
    seconds: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ConfigError(f"`{self}`: {problem}", "See docs/chaos.md.")

    def _problem(self) -> str:
        """What is wrong with it; empty if nothing is."""
        kind = self.kind
        if kind in _TIMED and self.seconds is None:
            return f"{kind} needs seconds=…"
        if kind is FaultKind.SLOW and (self.factor is None) == (self.seconds is None):
            return "slow needs either factor=… or seconds=…"
        if self.factor is not None and (kind is not FaultKind.SLOW or not self.factor >= 1):
            return "factor belongs to slow and is at least 1"
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            return "seconds are a number of at least 0"
        if kind in _MESSAGES and self.action not in (None, *_KIND_OF.values()):
            return f"{kind} happens to messages: {', '.join(_KIND_OF.values())}"
        if self.microbatch is not None and self.action not in (None, *_PER_MICROBATCH):
            return f"{self.action} happens once per update, not per microbatch"
        if self.stage is not None and self.stage < 0:
            return "stages count from 0"
        if self.microbatch is not None and self.microbatch < 0:
            return "microbatches count from 0"
        first, last = self.updates or (1, None)
        if first < 1 or (last is not None and last < first):
            return "updates count from 1, and the first comes first"
        if not 0 < self.probability <= 1:
            return "a probability is above 0 and at most 1"
        if self.count is not None and self.count < 1:
            return "count is at least 1"
        return ""

    @staticmethod
    def parse(text: str) -> "Fault":
        """A fault from text such as `kill stage=1 @update=30`; the inverse of `str`.

        Raises:
            ConfigError: saying which word is wrong.
        """
        kind, *words = [word for word in _SEPARATORS.split(text) if word] or [""]
        if kind not in [*FaultKind]:
            raise ConfigError(f"`{kind}` is no kind of fault", f"Kinds are {', '.join(FaultKind)}.")
        # Slowness lasts, all else happens once.
        values: dict[str, Any] = {"count": None} if kind == FaultKind.SLOW else {}
        for word in words:
            key, _, value = word.partition("=")
            if key not in _FIELDS:
                raise ConfigError(f"`{word}`: a fault has no `{key}`", f"{_HAS}.")
            name, read = _FIELDS[key]
            if name in values and name != "count":
                raise ConfigError(f"`{word}`: {key} is said twice")
            try:
                values[name] = read(value)
            except ValueError:
                raise ConfigError(
                    f"`{word}` cannot be read", f"Write {key}={_LIKE[key]}."
                ) from None
        return Fault(kind=FaultKind(kind), **values)

    def __str__(self) -> str:
        words = [str(self.kind)]
        for key, (name, _) in _FIELDS.items():
            value = getattr(self, name)
            if value != _DEFAULTS[name] and not (key == "count" and self.kind is FaultKind.SLOW):
                words.append(f"{key}={_write(value)}")
        return " ".join(words)

    def fits(self, stage: int, action: Kind, update: int, microbatch: int) -> bool:
        """Whether this is its address."""
        first, last = self.updates or (0, None)
        return (
            self.stage in (None, stage)
            and self.action in (None, action)
            and first <= update <= (update if last is None else last)
            and (
                self.microbatch is None
                or (action in _PER_MICROBATCH and self.microbatch == microbatch)
            )
        )


def read_span(text: str) -> tuple[int, int | None]:
    """`30`, `30..60` or `30..`: first and last number."""
    first, dots, last = text.partition("..")
    return int(first), (int(last) if last else None) if dots else int(first)


def _write(value: object) -> str:
    if isinstance(value, tuple):
        first, last = value
        return str(first) if first == last else f"{first}..{'' if last is None else last}"
    return "all" if value is None else str(value)


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "stage": ("stage", int),
    "action": ("action", lambda text: Kind(text.upper())),
    "update": ("updates", read_span),
    "microbatch": ("microbatch", int),
    "count": ("count", lambda text: None if text == "all" else int(text)),
    "probability": ("probability", float),
    "seconds": ("seconds", float),
    "factor": ("factor", float),
}
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Fault)}
_HAS = f"It has {', '.join(_FIELDS)}"
_LIKE = {
    "stage": "1",
    "action": f"B, or another of {', '.join(Kind)}",
    "update": "30, 30..60 or 30..",
    "microbatch": "0",
    "count": "3 or all",
    "probability": "0.5",
    "seconds": "2.5",
    "factor": "3",
}


@dataclass(frozen=True, kw_only=True)
class Firing:
    """A fault that happened, and where."""

    fault: Fault
    stage: int
    action: str
    update: int
    microbatch: int


class Injector:
    """Makes faults happen, through the hooks of one runtime at a time.

    It can be sent to another process until its first segment begins.

    Args:
        seed: of the faults that happen with a probability only.
        deeds: done in place of the real thing; for tests of what must not end the test.
    """

    def __init__(
        self,
        *faults: Fault,
        seed: int = 0,
        deeds: Mapping[FaultKind, Callable[[Fault], None]] | None = None,
    ) -> None:
        self.fired: list[Firing] = []
        self._faults = faults
        self._left = [math.inf if fault.count is None else fault.count for fault in faults]
        self._seed = seed
        self._deeds = dict(deeds or {})
        self._stage = -1
        self._segment: Segment | None = None
        self._released: threading.Event | None = None

    @property
    def hooks(self) -> RuntimeHooks:
        """To be given to a runtime or a worker."""
        return RuntimeHooks(
            begin=self._begin, before=self._before, pace=self._pace, sends=self._sends
        )

    def release(self) -> None:
        """Let whatever hangs go on."""
        if self._released is not None:
            self._released.set()

    def _begin(self, stage: int, segment: Segment) -> None:
        self._stage = stage
        self._segment = segment if segment.kind == "train" else None
        if self._released is None:
            self._released = threading.Event()

    def _before(self, action: Action) -> None:
        for fault in self._due(action, lambda kind: kind not in _MESSAGES | {FaultKind.SLOW}):
            self._do(fault, action)

    def _pace(self, action: Action, spent_s: float) -> None:
        for fault in self._due(action, lambda kind: kind is FaultKind.SLOW):
            extra_s = fault.seconds
            if extra_s is None:
                assert fault.factor is not None
                extra_s = spent_s * (fault.factor - 1)
            time.sleep(extra_s)

    def _sends(self, peer: WorkerId, tag: "Tag") -> bool:
        del peer
        if self._segment is None:
            return True
        kind = _KIND_OF[tag.kind]
        sent = True
        for index, fault in enumerate(self._faults):
            if fault.kind in _MESSAGES and self._takes(index, kind, tag.step, tag.microbatch):
                self._note(fault, kind, tag.step, tag.microbatch)
                if fault.kind is FaultKind.DROP:
                    sent = False
                else:
                    time.sleep(fault.seconds or 0.0)
        return sent

    def _due(self, action: Action, wanted: Callable[[FaultKind], bool]) -> list[Fault]:
        """Faults whose address the action is; they count as happened."""
        if self._segment is None:
            return []
        position, microbatch = self._segment.locate(action.microbatch)
        update = self._segment.batches[position].update
        found = []
        for index, fault in enumerate(self._faults):
            if wanted(fault.kind) and self._takes(index, action.kind, update, microbatch):
                self._note(fault, action.kind, update, microbatch)
                found.append(fault)
        return found

    def _takes(self, index: int, kind: Kind, update: int, microbatch: int) -> bool:
        """Whether it happens here, as its address, count and probability will have it."""
        fault = self._faults[index]
        if self._left[index] < 1 or not fault.fits(self._stage, kind, update, microbatch):
            return False
        if fault.probability < 1:
            place = f"{self._seed} {fault} {self._stage} {kind} {update} {microbatch}"
            digest = hashlib.sha256(place.encode()).digest()
            if int.from_bytes(digest[:8]) / 2**64 >= fault.probability:
                return False
        self._left[index] -= 1
        return True

    def _note(self, fault: Fault, kind: Kind, update: int, microbatch: int) -> None:
        action = f"{self._stage}{kind}{microbatch}"
        self.fired.append(
            Firing(
                fault=fault,
                stage=self._stage,
                action=action,
                update=update,
                microbatch=microbatch,
            )
        )

    def _do(self, fault: Fault, action: Action) -> None:
        if fault.kind in self._deeds:
            self._deeds[fault.kind](fault)
            return
        match fault.kind:
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultKind.HANG:
                assert self._released is not None
                self._released.wait(fault.seconds)
            case FaultKind.GIL:
                hold_gil(fault.seconds or 0.0)
            case FaultKind.ERROR:
                raise InjectedError(f"an injected error at {action} of stage {self._stage}")


def hold_gil(seconds: float) -> None:
    """Let no other thread of this process run Python for so long."""
    deadline = time.monotonic() + seconds
    # Of libraries opened so, functions run without giving the lock away; a signal ends the wait.
    library = ctypes.PyDLL(None)
    while (left_s := deadline - time.monotonic()) > 0:
        library.poll(None, 0, math.ceil(1000 * left_s))
