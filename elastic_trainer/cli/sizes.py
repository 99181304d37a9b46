"""What `data inspect` shows in a terminal: tables, and histograms of block characters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from elastic_trainer.data.media.histogram import Histogram, histogram
from elastic_trainer.observability.lines import dump_json
from elastic_trainer.observability.progress import format_count

if TYPE_CHECKING:
    from elastic_trainer.data.media.balance import Balance
    from elastic_trainer.data.media.inspect import Inspection

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show(found: "Inspection", balance: "Balance", as_json: bool) -> None:
    """Print all of it."""
    histograms = {title: histogram(values) for title, values in found.sizes.items()}
    if as_json:
        typer.echo(dump_json(_facts(found, balance, histograms), indent=2))
        return
    held_out = f", {found.num_rows['eval']} held out" if found.num_rows["eval"] else ""
    typer.echo(f"{found.path}: {found.num_rows['train']} rows to train on{held_out}")
    total = sum(found.num_rows.values())
    for modality, num in found.rows_with.items():
        typer.echo(f"  {modality:6} in {num} rows ({num / max(1, total):.0%})")
    if found.num_damaged:
        typer.echo(f"  {found.num_damaged} files cannot be read")
    for title, shown in histograms.items():
        typer.echo(f"\n{title}: {_summary(shown)}")
        for line in bars(shown):
            typer.echo(f"  {line}")
    typer.echo(f"\n{balance_title(balance)}")
    for way, ratio in balance.largest_over_mean.items():
        typer.echo(f"  {way:14}{ratio:5.2f}  {_bar(ratio - 1, _widest(balance))}".rstrip())


def balance_title(balance: "Balance") -> str:
    """What the numbers of the balance mean."""
    return (
        f"predicted largest over mean cost of {balance.num_microbatches} microbatches, "
        f"{balance.num_stages} stages ({balance.num_batches} batches of {balance.batch_size})"
    )


def bars(shown: Histogram) -> list[str]:
    """A line for each bin: from, to, a bar, how many."""
    widest = max(shown.counts)
    ends = [
        (number(low), number(high)) for low, high in zip(shown.edges, shown.edges[1:], strict=False)
    ]
    width = max(len(text) for pair in ends for text in pair)
    return [
        f"{low:>{width}} – {high:>{width}}  {_bar(count, widest):{_BAR}} {count}"
        for (low, high), count in zip(ends, shown.counts, strict=True)
    ]


def number(value: float) -> str:
    """Three digits or so: sizes range over decades."""
    return f"{value:.2g}" if value < 10 else format_count(value)


def _summary(shown: Histogram) -> str:
    return (
        f"{number(shown.smallest)} to {number(shown.largest)}, median {number(shown.median)}, "
        f"90% up to {number(shown.p90)}"
    )


def _widest(balance: "Balance") -> float:
    return max(ratio - 1 for ratio in balance.largest_over_mean.values())


def _bar(value: float, widest: float) -> str:
    eighths = round(8 * _BAR * value / widest) if widest > 0 else 0
    if value > 0:
        eighths = max(1, eighths)
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _facts(
    found: "Inspection", balance: "Balance", histograms: dict[str, Histogram]
) -> dict[str, object]:
    return {
        "path": found.path,
        "num_rows": found.num_rows,
        "rows_with": found.rows_with,
        "num_damaged": found.num_damaged,
        "sizes": {
            title: {
                "smallest": shown.smallest,
                "median": shown.median,
                "p90": shown.p90,
                "largest": shown.largest,
                "edges": _plain(shown.edges),
                "counts": _plain(shown.counts),
            }
            for title, shown in histograms.items()
        },
        "num_stages": balance.num_stages,
        "batch_size": balance.batch_size,
        "num_microbatches": balance.num_microbatches,
        "largest_over_mean": balance.largest_over_mean,
    }


def _plain(values: Sequence[float]) -> list[float]:
    return list(values)
