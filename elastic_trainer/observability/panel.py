"""The live panel: progress, loss, speed, and what each stage does with its time."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.align import Align
from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_trainer.observability.display import Clock, Display
from elastic_trainer.observability.progress import (
    Progress,
    busy_share,
    format_count,
    format_duration,
    format_number,
    sparkline,
)

REFRESH_PER_S = 4
MAX_WIDTH = 100
GAP = "   "
STATE_STYLES = {"running": "green", "completed": "green", "failed": "red"}
PHASES = (  # in the order of the bar
    ("busy", "cyan"),
    ("forward", "cyan"),
    ("backward", "blue"),
    ("optimizer", "magenta"),
    ("send", "yellow"),
    ("recv", "yellow"),
)


class RichDisplay(Display):
    """A live panel; messages scroll above it."""

    def __init__(self, console: Console, *, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self.progress = Progress()
        self._live: Live | None = None

    def plan(self, plan: Mapping[str, Any]) -> None:
        self.progress.see_plan(plan)

    def status(self, status: Mapping[str, Any]) -> None:
        self.progress.see_status(status, self._clock())
        self._show()

    def update(self, line: Mapping[str, Any]) -> None:
        self.progress.see_line(line)
        self._show()

    def message(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def close(self) -> None:
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """The panel as it stands now."""
        progress = self.progress
        rows: list[RenderableType] = [self._progress_row(), self._loss_row(), self._speed_row()]
        if progress.stages or progress.stage_shares():
            rows.append(Padding(self._stage_table(), (1, 0, 0, 0)))
            has_phases = any(len(share) > 1 for share in progress.stage_shares())
            rows.append(Align.right(_legend()) if has_phases else Text())
        rows.append(self._facts())
        if progress.status.get("warning"):
            rows.append(Text(str(progress.status["warning"]), style="yellow"))
        return Panel(
            Group(*rows),
            title=Text.assemble(("elastic-trainer", "bold"), f"  {progress.name}"),
            title_align="left",
            subtitle=self._state(),
            subtitle_align="left",
            box=ROUNDED,
            border_style="bright_black",
            padding=(0, 1),
            width=min(MAX_WIDTH, self._console.width),
        )

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self.render,
                console=self._console,
                refresh_per_second=REFRESH_PER_S,
            )
            self._live.start()

    def _progress_row(self) -> RenderableType:
        progress = self.progress
        total = progress.total
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        count = f"update {progress.update}" + (f" / {total}" if total else "")
        bar = ProgressBar(
            total=total or 1, completed=progress.update if total else 0, pulse=total is None
        )
        times = Text.assemble(
            format_duration(progress.elapsed_s(self._clock())),
            ("  ETA ", "dim"),
            format_duration(progress.eta_s),
        )
        row.add_row(Text(count, style="bold"), bar, times)
        return row

    def _loss_row(self) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        loss = _fact("loss", format_number(self.progress.line.get("loss")), "bold green")
        row.add_row(loss, _Sparkline(self.progress.losses))
        return row

    def _speed_row(self) -> RenderableType:
        progress, line = self.progress, self.progress.line
        step = f"{1000 * progress.step_s:.0f} ms" if progress.step_s is not None else "–"
        if progress.predicted_step_s:
            step += f" (planned {1000 * progress.predicted_step_s:.0f})"
        return _Facts(
            [
                _fact("tokens/s", format_count(progress.tokens_per_s), "bold"),
                _fact("step", step),
                _fact("lr", format_number(line.get("lr"), 3)),
                _fact("grad norm", format_number(line.get("grad_norm"), 3)),
            ]
        )

    def _stage_table(self) -> RenderableType:
        progress, shares = self.progress, self.progress.stage_shares()
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, style="dim", overflow="ellipsis", max_width=28)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        for index in range(max(len(progress.stages), len(shares))):
            share = shares[index] if index < len(shares) else {}
            percent = f"{100 * busy_share(share):.0f}% busy" if share else "–"
            table.add_row(f"stage {index}", progress.stage_layers(index), _ShareBar(share), percent)
        return table

    def _facts(self) -> RenderableType:
        progress, status = self.progress, self.progress.status
        facts: list[Text] = []
        if status.get("eval_loss") is not None:
            facts.append(_fact("held-out loss", format_number(status["eval_loss"])))
        if status.get("perplexity") is not None:
            facts.append(_fact("perplexity", format_number(status["perplexity"])))
        if status.get("checkpoint_update") is not None:
            age = self._clock() - (progress.checkpoint_seen_at or 0.0)
            text = f"update {status['checkpoint_update']}, {format_duration(age)} ago"
            facts.append(_fact("checkpoint", text))
        if progress.schedule:
            facts.append(_fact("schedule", progress.schedule))
        if status.get("metrics_address"):
            facts.append(_fact("metrics", f"http://{status['metrics_address']}/metrics"))
        return _Facts(facts)

    def _state(self) -> Text:
        status = self.progress.status
        state = str(status.get("state", "starting"))
        text = Text(f" {state} ", style=STATE_STYLES.get(state, "yellow"))
        if state != "running" and status.get("reason"):
            text.append(f"{status['reason']} ", style="dim")
        return text


class _ShareBar:
    """One stage's time, phase by phase, over the width that there is."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        text, end = Text(), 0.0
        for phase, style in PHASES:
            end += self._shares.get(phase, 0.0)
            text.append("━" * (round(min(1.0, end) * width) - len(text)), style=style)
        text.append("━" * (width - len(text)), style="grey23")
        yield text


class _Sparkline:
    """Values as a row of bars over the width that there is."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self._values, options.max_width), style="green", no_wrap=True)


class _Facts:
    """Facts side by side; lines break between them."""

    def __init__(self, facts: Sequence[Text]) -> None:
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for fact in self._facts:
            if line and len(line) + len(GAP) + len(fact) > options.max_width:
                yield line
                line = Text()
            line = Text(GAP).join([line, fact]) if line else fact
        yield line


def _fact(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _legend() -> Text:
    names = ("forward", "backward", "optimizer", "transfer", "idle")
    styles = ("cyan", "blue", "magenta", "yellow", "grey23")
    pairs = zip(names, styles, strict=True)
    return Text("  ").join(Text.assemble(("━ ", style), (name, "dim")) for name, style in pairs)
