"""The coordinator's queue: what was ordered, in order, until the workers have it.

Segments, evaluations and checkpoints reach every worker in the order in which the elastic core gave
them, since each worker carries out its calls one by one. A segment can only be sent when the loader
has said what its batches hold, so it may have to wait here, and what was ordered after it, too.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_trainer.types import BatchInfo, StageReport


@dataclass(kw_only=True)
class Order:
    """One thing to send to all workers: `kind` is segment, evaluation or checkpoint.

    `snapshot`: workers keep copies of the state behind it. `batches` is None until the loader has
    answered. `started_at` is wall time of the sending.
    """

    kind: str
    generation: int
    update: int
    snapshot: bool = False
    batches: list[BatchInfo] | None = None
    reports: dict[int, StageReport] = field(default_factory=dict)
    started_at: float = 0.0

    @property
    def ready(self) -> bool:
        return self.kind == "checkpoint" or self.batches is not None


class Dispatch:
    """Sends orders strictly in order, each as soon as it and all before it are ready."""

    def __init__(self, send: Callable[[Order], None]) -> None:
        self._send = send
        self._waiting: deque[Order] = deque()

    def add(self, order: Order) -> None:
        self._waiting.append(order)
        self.pump()

    def pump(self) -> None:
        """Send what can be sent."""
        while self._waiting and self._waiting[0].ready:
            self._send(self._waiting.popleft())

    def truncate(self, update: int) -> None:
        """Forget orders that concern states after `update`, which will not come to be."""
        self._waiting = deque(o for o in self._waiting if o.update <= update)

    def clear(self) -> None:
        self._waiting.clear()
