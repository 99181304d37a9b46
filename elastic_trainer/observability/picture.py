"""A picture of the live panel, drawn from a run's folder, for documents.

`python -m elastic_trainer.observability.picture RUN [UPDATE] > progress.svg` shows the run as it
stood after UPDATE (default: its last).
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from elastic_trainer.errors import ElasticTrainerError, RunError
from elastic_trainer.observability.panel import MAX_WIDTH, RichDisplay
from elastic_trainer.observability.runs import read_plan, read_status, read_updates, resolve_run


def draw(run_dir: Path, update: int | None = None) -> str:
    """The panel as SVG."""
    lines = [u for u in read_updates(run_dir) if update is None or u["update"] <= update]
    if not lines:
        raise RunError(f"The run {run_dir} has no update to show")
    status = read_status(run_dir)
    now = started = float(status.get("started_at") or lines[0].get("time") or 0.0)
    if status.get("total_updates") != lines[-1]["update"]:
        status["state"] = "running"
    if (status.get("checkpoint_update") or 0) > lines[-1]["update"]:
        del status["checkpoint_update"]
    console = Console(record=True, file=io.StringIO(), width=MAX_WIDTH, force_terminal=True)
    display = RichDisplay(console, clock=lambda: now)
    display.progress.see_status(status, started)
    display.progress.see_plan(read_plan(run_dir))
    for line in lines:
        display.progress.see_line(line)
    times = {line["update"]: float(line.get("time") or started) for line in lines}
    display.progress.checkpoint_seen_at = times.get(status.get("checkpoint_update", 0))
    now = times[lines[-1]["update"]]
    console.print(display.render())
    return console.export_svg(title=str(status["name"]))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m elastic_trainer.observability.picture RUN [UPDATE]")
    try:
        chosen = int(sys.argv[2]) if len(sys.argv) == 3 else None
        sys.stdout.write(draw(resolve_run(sys.argv[1]), chosen))
    except (ElasticTrainerError, ValueError) as error:
        sys.exit(str(error))
