"""What commands print: a table for people, or JSON for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elastic_trainer.observability.changes import costs, headline
from elastic_trainer.observability.lines import dump_json
from elastic_trainer.observability.progress import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
)
from elastic_trainer.types import CheckpointInfo, Plan, to_jsonable

if TYPE_CHECKING:
    from elastic_trainer.data.publish import DatasetInfo
    from elastic_trainer.testing.chaos.verdict import Verdict

SHOWN_CHANGES = 10


def plan(made: Plan, as_json: bool) -> None:
    """Stages, predictions and reasons."""
    if as_json:
        typer.echo(dump_json(to_jsonable(made), indent=2))
        return
    predicted = made.predicted
    typer.echo(
        f"{made.num_stages} stages, {made.schedule}, {made.num_microbatches} microbatches a batch: "
        f"predicted {1000 * predicted.step_s:.1f} ms a step, {predicted.bubble_ratio:.0%} idle"
    )
    rows = [
        [
            str(stage.stage),
            stage.worker,
            _span(made.layers[stage.first : stage.stop]),
            f"{1000 * busy:.1f} ms",
            format_bytes(memory),
        ]
        for stage, busy, memory in zip(
            made.stages, predicted.stage_busy_s, predicted.stage_memory_bytes, strict=True
        )
    ]
    _table(["stage", "worker", "layers", "busy a step", "memory"], rows)
    for reason in made.reasons:
        typer.echo(f"- {reason}")


def dataset(info: "DatasetInfo") -> None:
    """What was made, and what to do with it."""
    verb = "Kept" if info.reused else "Made"
    unit = "rows" if info.rows_with else "documents"
    typer.echo(
        f"{verb} {info.path}: {info.num_rows} {unit} to train on, {info.num_eval_rows} held "
        f"out, {format_count(info.num_chars)} characters, vocabulary {info.vocab_size}"
    )
    if not info.rows_with:
        typer.echo(f"Train on it: elastic-trainer train gpt data.path={info.path}")
        return
    parts = [f"{name} in {num}" for name, num in info.rows_with.items() if num]
    spoken = f"; {format_duration(info.audio_s)} of sound" if info.audio_s else ""
    typer.echo(f"Rows with {', '.join(parts)}{spoken}")
    if info.num_skipped:
        typer.echo(f"Left out: {info.num_skipped}. The first of them:")
        for reason in info.skipped[:3]:
            typer.echo(f"- {reason}")
    typer.echo(f"Look into it: elastic-trainer data inspect {info.path}")
    typer.echo(f"Train on it: elastic-trainer train captions data.path={info.path}")


def status(story: Mapping[str, Any], as_json: bool) -> None:
    """Where a run stands, and what happened last."""
    if as_json:
        typer.echo(dump_json(story, indent=2))
        return
    total = f" of {story['total_updates']}" if story.get("total_updates") else ""
    reason = f": {story['reason']}" if story.get("reason") else ""
    typer.echo(f"{story['name']}: {story['state']}{reason}")
    facts = {
        "update": f"{story['update']}{total}",
        "loss": format_number(story.get("loss")),
        "tokens/s": format_number(story.get("tokens_per_s"), 3),
        "held-out loss": format_number(story.get("eval_loss")),
        "perplexity": format_number(story.get("perplexity")),
        "checkpoint": story.get("checkpoint") or "–",
        "metrics": _metrics_url(story),
        "warning": story.get("warning") or "–",
        "workers": _workers(story),
        "loaders": _loaders(story),
        "folder": story["run_dir"],
    }
    stages = story["plan"].get("stages", ())
    layers = story["plan"].get("layers", ())
    for stage in stages:
        span = _span(layers[stage["first"] : stage["stop"]])
        facts[f"stage {stage['stage']}"] = f"{stage['worker']}: {span}"
    width = max(map(len, facts)) + 1
    for name, value in facts.items():
        if value != "–":
            typer.echo(f"  {name:{width}}{value}")
    _membership(story["membership"])
    for event in story["events"]:
        typer.echo(f"  {_time(event['time'])}  {event['message']}")


def _workers(story: Mapping[str, Any]) -> str:
    """How many there are of how many, in which states, and where."""
    there = story.get("workers")
    if not there or not story["alive"]:
        return "–"
    states = Counter(facts["state"] for facts in there.values())
    idle = [f"{states[s]} {s}" for s in ("starting", "idle", "leaving") if states[s]]
    pending = story.get("pending_workers")
    parts = [*idle, *([f"{pending} asked for"] if pending else [])]
    wanted = span_of_workers(story["min_workers"], story["num_workers"])
    nodes = len({facts["node"] for facts in there.values() if facts["node"]})
    more = f" ({', '.join(parts)})" if parts else ""
    return f"{len(there)} of {wanted}{more} on {nodes} node{'' if nodes == 1 else 's'}"


def _loaders(story: Mapping[str, Any]) -> str:
    """How many there are, in which states, and where, if there are several."""
    there = story.get("loaders") or {}
    if len(there) < 2 or not story["alive"]:
        return "–"
    states = Counter(facts["state"] for facts in there.values())
    idle = [f"{states[s]} {s}" for s in ("starting", "idle") if states[s]]
    nodes = len({facts["node"] for facts in there.values() if facts["node"]})
    more = f" ({', '.join(idle)})" if idle else ""
    return f"{len(there)}{more} on {nodes} node{'' if nodes == 1 else 's'}"


def runs(found: Sequence[Mapping[str, Any]], storage: Path, as_json: bool) -> None:
    """One line per run."""
    if as_json:
        typer.echo(dump_json(found, indent=2))
        return
    if not found:
        typer.echo(f"No runs in {storage.absolute()}.")
        return
    rows = [
        [
            run["name"],
            run["state"],
            f"{run['update']}" + (f"/{run['total_updates']}" if run.get("total_updates") else ""),
            format_number(run.get("loss")),
            format_number(run.get("perplexity")),
            _age(run),
        ]
        for run in found
    ]
    _table(["run", "state", "update", "loss", "perplexity", "ran for"], rows)


def checkpoints(found: Sequence[CheckpointInfo], as_json: bool) -> None:
    """One line per checkpoint."""
    if as_json:
        typer.echo(dump_json([to_jsonable(info) for info in found], indent=2))
        return
    if not found:
        typer.echo("No complete checkpoint.")
        return
    rows = [
        [str(info.update), _time(info.created_at), format_bytes(info.num_bytes), info.path]
        for info in found
    ]
    _table(["update", "written", "size", "path"], rows)


def evaluation(measured: Mapping[str, Any], as_json: bool) -> None:
    """Loss and, of text, perplexity."""
    if as_json:
        typer.echo(dump_json(measured, indent=2))
        return
    text = f"{measured['run']} at update {measured['update']}: held-out loss {measured['loss']:.4f}"
    unit = "items"
    if measured["perplexity"] is not None:
        text, unit = f"{text}, perplexity {measured['perplexity']:.2f}", "tokens"
    typer.echo(f"{text} over {measured['tokens']} {unit}")


def verdict(made: "Verdict", as_json: bool) -> None:
    """What was done to a run, how it took it, and what is wrong."""
    if as_json:
        facts = to_jsonable(made) | {"passed": made.passed}
        for row, judged in zip(facts["rows"], made.rows, strict=True):
            row["passed"] = judged.passed
        typer.echo(dump_json(facts, indent=2))
        return
    rows = [
        [
            row.text,
            ", ".join(row.workers) or "–",
            row.found or "–",
            "–" if row.recovery_s is None else f"{row.recovery_s:.2f} s",
            row.problem or "passed",
        ]
        for row in made.rows
    ]
    _table(["event", "worker", "found", "went on after", "verdict"], rows)
    for problem in made.problems:
        typer.echo(f"- {problem}")
    word = "PASSED" if made.passed else "FAILED"
    typer.echo(
        f"{word}: {made.state} at update {made.update}, samples of {made.num_audited} updates "
        "compared"
    )


def span_of_workers(fewest: int, most: int) -> str:
    """How many workers, in words."""
    if fewest != most:
        return f"{fewest} to {most} workers"
    return f"{most} worker{'' if most == 1 else 's'}"


def _membership(changes: Sequence[Mapping[str, Any]]) -> None:
    """The newest changes of the membership, and what each took."""
    if len(changes) > SHOWN_CHANGES:
        typer.echo(f"  membership: the newest {SHOWN_CHANGES} of {len(changes)} changes")
    elif changes:
        typer.echo("  membership:")
    for change in changes[-SHOWN_CHANGES:]:
        typer.echo(f"    {headline(change)}")
        if taken := costs(change):
            typer.echo(f"{'':25}{taken}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell: fit to be cut by other programs, unlike a box."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())


def _span(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _age(run: Mapping[str, Any]) -> str:
    started, updated = run.get("started_at"), run.get("updated_at")
    return format_duration(updated - started if started and updated else None)


def _metrics_url(story: Mapping[str, Any]) -> str:
    address = story.get("metrics_address")
    return f"http://{address}/metrics" if address and story["alive"] else "–"
