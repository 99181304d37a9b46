"""Hooks around the actions of a stage: for tests and injected faults."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_trainer.schedule.actions import Action
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import WorkerId

if TYPE_CHECKING:  # it needs torch, and programs that only hand hooks on do not
    from elastic_trainer.transport.channel import Tag


@dataclass(frozen=True)
class RuntimeHooks:
    """Called on the compute thread; what they raise ends the segment as an action's error does.

    Attributes:
        begin: a segment begins on this stage, or is under way when the hooks come; then another
            thread calls.
        before: an action comes next.
        pace: an action took so many seconds, waits left out; time spent here is added to them.
        after: an action is over.
        sends: whether a message to this peer may really leave.
    """

    begin: Callable[[int, Segment], None] | None = None
    before: Callable[[Action], None] | None = None
    pace: Callable[[Action, float], None] | None = None
    after: Callable[[Action], None] | None = None
    sends: "Callable[[WorkerId, Tag], bool] | None" = None


class HookSet:
    """Hooks by name. Any thread may change them, also while a segment runs."""

    def __init__(self, hooks: RuntimeHooks | None = None) -> None:
        self._named = {} if hooks is None else {"": hooks}
        self._segment: tuple[int, Segment] | None = None
        self._active: tuple[RuntimeHooks, ...] = ()
        self._changing = threading.Lock()

    def put(self, name: str, hooks: RuntimeHooks | None) -> None:
        """Add hooks, or replace those of this name; None: take them away."""
        with self._changing:
            self._named.pop(name, None)
            if hooks is not None:
                self._named[name] = hooks
                if self._segment is not None and hooks.begin is not None:
                    hooks.begin(*self._segment)
            if self._segment is not None:
                self._active = tuple(self._named.values())

    def begin(self, stage: int, segment: Segment) -> None:
        with self._changing:
            self._segment = stage, segment
            self._active = tuple(self._named.values())
        for hooks in self._active:
            if hooks.begin is not None:
                hooks.begin(stage, segment)

    def before(self, action: Action) -> None:
        for hooks in self._active:
            if hooks.before is not None:
                hooks.before(action)

    def pace(self, action: Action, spent_s: Callable[[], float]) -> None:
        for hooks in self._active:
            if hooks.pace is not None:
                hooks.pace(action, spent_s())

    def after(self, action: Action) -> None:
        for hooks in self._active:
            if hooks.after is not None:
                hooks.after(action)

    def sends(self, peer: WorkerId, tag: "Tag") -> bool:
        asked = [hooks.sends(peer, tag) for hooks in self._active if hooks.sends is not None]
        return all(asked)
