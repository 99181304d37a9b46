"""What the benchmarks share: runs in scratch folders, figures as JSON, facts of the machine."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elastic_trainer import RunResult, fit


def arguments(description: str, repeats: int = 5, names: Sequence[str] = ()) -> argparse.Namespace:
    """Command line of a benchmark; `names`: of figures that can be asked for alone."""
    return parser(description, repeats, names).parse_args()


def parser(
    description: str, repeats: int = 5, names: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The same, to be extended."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    found.add_argument("--repeats", type=int, default=repeats, help="samples per figure")
    if names:
        found.add_argument(
            "--only", nargs="+", choices=names, default=names, metavar="NAME", help="these figures"
        )
    return found


@dataclass(frozen=True)
class Trained:
    """A finished run: the lines of its metrics file, and the step time that its plan predicted."""

    lines: list[dict[str, Any]]
    predicted_step_s: float


def train(config: str | dict[str, Any], *overrides: str) -> Trained:
    """Train in a scratch folder without evaluation.

    Raises:
        RuntimeError: the run did not complete.
    """
    with tempfile.TemporaryDirectory(prefix="et-bench-") as folder:
        result: RunResult = fit(
            config,
            "train.eval_batches=0",
            *overrides,
            run_dir=Path(folder) / "run",
            display=False,
        )
        if result.status != "completed":
            raise RuntimeError(f"{result.status}: {result.reason}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        plan = json.loads((Path(folder) / "run" / "plan.json").read_text())
        return Trained([json.loads(line) for line in lines], plan["predicted"]["step_s"])


def median_step_s(lines: Sequence[dict[str, Any]], skip: int) -> float:
    """Median duration of the updates after the first `skip`, which warm things up."""
    durations: list[float] = [line["step_s"] for line in lines[skip:]]
    return statistics.median(durations)


def figure(samples: Sequence[float], unit: str = "ratio") -> dict[str, Any]:
    """A figure: the median of its samples."""
    return {"value": statistics.median(samples), "unit": unit, "samples": list(samples)}


def show(figures: dict[str, dict[str, Any]], as_json: bool, **extra: Any) -> None:
    """Print the figures."""
    if as_json:
        print(json.dumps({"figures": figures, "machine": machine(), **extra}))
        return
    for name, entry in figures.items():
        spread = f"{min(entry['samples']):.4g} to {max(entry['samples']):.4g}"
        print(f"{name:34} {entry['value']:.4g} {entry['unit']}  ({spread})")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "load_1min": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


def log(text: str) -> None:
    """Progress of the benchmark, beside its JSON."""
    print(text, file=sys.stderr, flush=True)
