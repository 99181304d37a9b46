"""Progress on the user's terminal: a live panel on a TTY, now and then a plain line otherwise."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from elastic_trainer.observability.progress import (
    Progress,
    busy_share,
    format_count,
    format_duration,
    format_number,
)

Clock = Callable[[], float]
PLAIN_EVERY_S = 5.0


class Display(ABC):
    """What the trainer tells the user while it works; a context that ends with the run.

    All calls come from one thread. Plans, statuses and lines are the plain dicts of the run folder
    (`plan.json`, `status.json`, `metrics.jsonl`) and may be repeated.
    """

    @abstractmethod
    def plan(self, plan: Mapping[str, Any]) -> None:
        """The run has a plan, or a newer one."""

    @abstractmethod
    def status(self, status: Mapping[str, Any]) -> None:
        """Where the run stands."""

    @abstractmethod
    def update(self, line: Mapping[str, Any]) -> None:
        """An update was committed; they come in order."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Something worth a line of its own happened."""

    @abstractmethod
    def close(self) -> None:
        """The run is over, well or not; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SilentDisplay(Display):
    """Shows nothing."""

    def plan(self, plan: Mapping[str, Any]) -> None:
        pass

    def status(self, status: Mapping[str, Any]) -> None:
        pass

    def update(self, line: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainDisplay(Display):
    """A line every few seconds, for logs."""

    def __init__(
        self,
        stream: TextIO,
        *,
        every_s: float = PLAIN_EVERY_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._progress = Progress()
        self._printed_at: float | None = None
        self._printed_update = 0
        self._told: dict[str, Any] = {}

    def plan(self, plan: Mapping[str, Any]) -> None:
        if plan.get("generation") == self._told.get("generation"):
            return
        self._told["generation"] = plan.get("generation")
        self._progress.see_plan(plan)
        for index, stage in enumerate(self._progress.stages):
            self.message(f"{stage['worker']}: {self._progress.stage_layers(index)}")

    def status(self, status: Mapping[str, Any]) -> None:
        self._progress.see_status(status, self._clock())
        for key in ("state", "warning", "eval_loss", "checkpoint_update"):
            if status.get(key) is not None and status[key] != self._told.get(key):
                self._told[key] = status[key]
                self.message(self._progress.sentence(key))

    def update(self, line: Mapping[str, Any]) -> None:
        self._progress.see_line(line)
        now = self._clock()
        if self._printed_at is None or now - self._printed_at >= self._every_s:
            self._printed_at = now
            self._print_progress()

    def message(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._progress.update > self._printed_update:
            self._print_progress()

    def _print_progress(self) -> None:
        progress, line = self._progress, self._progress.line
        self._printed_update = progress.update
        total = f"/{progress.total}" if progress.total else ""
        parts = [
            f"update {progress.update}{total}",
            f"loss {format_number(line.get('loss'))}",
            f"lr {format_number(line.get('lr'), 3)}",
            f"grad norm {format_number(line.get('grad_norm'), 3)}",
            f"{format_count(progress.tokens_per_s)} tokens/s",
        ]
        shares = progress.stage_shares()
        if shares:
            parts.append("busy " + " ".join(f"{100 * busy_share(share):.0f}%" for share in shares))
        if progress.eta_s is not None:
            parts.append(f"ETA {format_duration(progress.eta_s)}")
        self.message("  ".join(parts))


def choose_display(display: Display | bool = True, stream: TextIO | None = None) -> Display:
    """The display itself, or the one that suits the stream (standard output by default)."""
    if isinstance(display, Display):
        return display
    if not display:
        return SilentDisplay()
    stream = stream or sys.stdout
    if not stream.isatty():
        return PlainDisplay(stream)
    # Rich takes a tenth of a second to load, which a log does not need.
    from rich.console import Console

    from elastic_trainer.observability.panel import RichDisplay

    console = Console(file=stream)
    return PlainDisplay(stream) if console.is_dumb_terminal else RichDisplay(console)
