"""What a run's elasticity cost it, for people and for programs: exit_report.txt and .json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic_trainer.observability.changes import (
    SOURCES,
    START,
    UNPLANNED,
    costs,
    headline,
    moved,
    seats,
)
from elastic_trainer.observability.lines import dump_json, full_disk_tolerated
from elastic_trainer.observability.progress import format_duration
from elastic_trainer.observability.record import (
    EXIT_REPORT_FILE,
    EXIT_REPORT_TEXT_FILE,
    write_atomically,
)

Fact = Mapping[str, Any]


def make_report(
    *,
    run: str,
    status: str,
    reason: str,
    update: int,
    started_at: float,
    ended_at: float,
    budgets: Mapping[str, tuple[int, int]],
    changes: Sequence[Fact],
) -> dict[str, Any]:
    """The report, JSON-able."""
    recoveries = [
        c["first_commit_s"]
        for c in changes
        if c["cause"] in UNPLANNED and c["first_commit_s"] is not None
    ]
    return {
        "run": run,
        "status": status,
        "reason": reason,
        "update": update,
        "started_at": started_at,
        "ended_at": ended_at,
        "budgets": {
            name: {"spent": spent, "limit": None if limit < 0 else limit}
            for name, (spent, limit) in budgets.items()
        },
        "totals": {
            "changes": dict(Counter(c["cause"] for c in changes)),
            "updates_replayed": sum(c["updates_replayed"] for c in changes),
            "samples_reread": sum(c["samples_reread"] for c in changes),
            "moved_bytes": {
                source: sum(c["moved_bytes"].get(source, 0) for c in changes) for source in SOURCES
            },
            "recoveries": len(recoveries),
            "recovery_s": sum(recoveries),
            "longest_recovery_s": max(recoveries, default=None),
        },
        "changes": list(changes),
    }


def report_text(report: Fact) -> str:
    """The report for people."""
    begin, end = (datetime.fromtimestamp(report[key]) for key in ("started_at", "ended_at"))
    lasted = format_duration(report["ended_at"] - report["started_at"])
    totals = report["totals"]
    lines = [
        f"{report['run']}: {report['status']} at update {report['update']}: {report['reason']}",
        f"From {begin:%Y-%m-%d %H:%M:%S} to {end:%Y-%m-%d %H:%M:%S} ({lasted}).",
    ]
    counts = {cause: n for cause, n in totals["changes"].items() if cause != START}
    lines.append(
        "Changes of the membership: "
        + (", ".join(f"{cause} {n}" for cause, n in counts.items()) or "none")
        + "."
    )
    if totals["recoveries"]:
        lines.append(
            f"Recoveries: {totals['recoveries']}, {totals['recovery_s']:.2f} s in all, "
            f"{totals['longest_recovery_s']:.2f} s the longest."
        )
    lines.append(
        f"Done again: {totals['updates_replayed']} updates, {totals['samples_reread']} samples. "
        f"Taken over: {', '.join(moved(totals['moved_bytes'])) or 'nothing'}."
    )
    lines += [
        f"{name.capitalize()}: {b['spent']} of {'any number' if b['limit'] is None else b['limit']}"
        for name, b in report["budgets"].items()
    ]
    for change in report["changes"]:
        details = [change["reason"], costs(change), change["note"], *seats(change)]
        lines += ["", headline(change), *(f"    {detail}" for detail in details if detail)]
    return "\n".join(lines) + "\n"


def write_report(run_dir: Path, report: Fact) -> None:
    """Put both forms into the run folder; a full disk does not end the run differently."""
    with full_disk_tolerated():
        write_atomically(run_dir / EXIT_REPORT_FILE, dump_json(report, indent=2) + "\n")
        write_atomically(run_dir / EXIT_REPORT_TEXT_FILE, report_text(report))
