"""Where a run stands, as the displays show it. Pure: fed with plain dicts and the time."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPARKS = "▁▂▃▄▅▆▇█"
SMOOTHING = 0.1  # weight of the newest update in the averages
LOSS_HISTORY = 4096


@dataclass(kw_only=True, slots=True)
class Progress:
    """What has been told of the run so far."""

    name: str = ""
    run_dir: str = ""
    schedule: str = ""
    stages: Sequence[Mapping[str, Any]] = ()
    layers: Sequence[str] = ()
    predicted_step_s: float | None = None
    started_at: float | None = None
    status: dict[str, Any] = field(default_factory=dict)
    line: dict[str, Any] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_HISTORY))
    step_s: float | None = None
    tokens_per_s: float | None = None
    checkpoint_seen_at: float | None = None

    def see_plan(self, plan: Mapping[str, Any]) -> None:
        """Take over the newest plan."""
        self.stages = plan.get("stages", ())
        self.layers = plan.get("layers", ())
        self.schedule = plan.get("schedule", "")
        self.predicted_step_s = plan.get("predicted", {}).get("step_s")

    def see_status(self, status: Mapping[str, Any], now: float) -> None:
        """Take over the newest status."""
        if self.started_at is None:
            self.started_at = now
        if status.get("checkpoint_update") != self.status.get("checkpoint_update"):
            self.checkpoint_seen_at = now
        self.status |= status
        self.name = str(self.status.get("name", self.name))
        self.run_dir = str(self.status.get("run_dir", self.run_dir))

    def see_line(self, line: Mapping[str, Any]) -> None:
        """Take over the line of an update."""
        if line.get("update", 0) <= self.update:
            return
        self.line = dict(line)
        if line.get("loss") is not None:
            self.losses.append(float(line["loss"]))
        self.step_s = _smooth(self.step_s, line.get("step_s"))
        self.tokens_per_s = _smooth(self.tokens_per_s, line.get("tokens_per_s"))

    @property
    def update(self) -> int:
        return int(self.line.get("update", 0))

    @property
    def total(self) -> int | None:
        total = self.status.get("total_updates")
        return int(total) if total else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last update at the present speed."""
        if self.total is None or self.step_s is None:
            return None
        return max(0, self.total - self.update) * self.step_s

    def sentence(self, key: str) -> str:
        """What one field of the status means, in words."""
        status = self.status
        if key == "state":
            reason = status.get("reason")
            return f"{status['state']}: {reason}" if reason else str(status["state"])
        if key == "eval_loss":
            text = f"held-out loss {format_number(status['eval_loss'])}"
            perplexity = status.get("perplexity")
            return text if perplexity is None else f"{text}, perplexity {format_number(perplexity)}"
        if key == "checkpoint_update":
            return f"checkpoint at update {status['checkpoint_update']}"
        return str(status[key])

    def elapsed_s(self, now: float) -> float:
        """Seconds since the run began here."""
        return 0.0 if self.started_at is None else now - self.started_at

    def stage_shares(self) -> list[dict[str, float]]:
        """Per stage, phase -> share of its time; plain numbers count as busy."""
        shares = self.status.get("stage_busy") or []
        return [dict(s) if isinstance(s, Mapping) else {"busy": float(s)} for s in shares]

    def stage_layers(self, index: int) -> str:
        """First and last layer of a stage."""
        if index >= len(self.stages):
            return ""
        stage = self.stages[index]
        names = list(self.layers[stage["first"] : stage["stop"]])
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else ""


def busy_share(shares: Mapping[str, float]) -> float:
    """Computing share of a stage: what is neither waiting nor moving tensors."""
    return sum(shares.get(phase, 0.0) for phase in ("busy", "forward", "backward", "optimizer"))


def phase_shares(busy_s: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Seconds by phase as shares of the wall time, for the status's `stage_busy`."""
    return {phase: seconds / wall_s for phase, seconds in busy_s.items()} if wall_s > 0 else {}


def _smooth(average: float | None, value: Any) -> float | None:
    if value is None:
        return average
    return float(value) if average is None else average + SMOOTHING * (value - average)


def format_duration(seconds: float | None) -> str:
    """`1:05`, `2:03:09`; a dash when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(value: float | None) -> str:
    """Three digits and a unit: `950`, `12.3k`, `4.56M`; a dash when unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < 999.5:
        return f"{value:.0f}"
    power = min(3, int(math.log10(abs(value) * 1.0005) // 3))  # 999.6 shows as 1.00k
    scaled = value / 1000**power
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{' kMG'[power]}"


def format_number(value: float | None, digits: int = 4) -> str:
    """A number with that many significant digits; a dash when unknown."""
    return "–" if value is None else f"{value:.{digits}g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of at most `width` bars, each the mean of its share of them."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    edges = [round(index * len(finite) / columns) for index in range(columns + 1)]
    means = [
        sum(finite[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)
    ]
    low, high = min(means), max(means)
    if high == low:
        return SPARKS[0] * columns
    return "".join(SPARKS[int((m - low) / (high - low) * (len(SPARKS) - 1))] for m in means)


def format_bytes(value: float) -> str:
    """Bytes with a binary unit."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
