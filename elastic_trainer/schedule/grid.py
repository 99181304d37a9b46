"""Draws a schedule as a grid, one column per stage, with the place of a failure marked."""

from collections.abc import Sequence

from elastic_trainer.schedule.actions import ActionLists

MARK = "<-- HERE"
_BEFORE = 6
_AFTER = 6
_WHOLE = 40


def format_grid(
    lists: ActionLists,
    progress: Sequence[int] | None = None,
    error: tuple[int, int] | None = None,
) -> str:
    """Workers × actions.

    Args:
        lists: the actions of each stage.
        progress: how many actions each stage has done. Rows are then counted from each stage's own
            position, so that the row `now` shows what everybody was at; without it rows are the
            indices in the lists.
        error: stage and index of the action to mark; the index may be one past the end.
    """
    longest = max((len(actions) for actions in lists), default=0)
    if progress is not None:
        anchors = list(progress)
        rows = range(-min(_BEFORE, max(anchors, default=0)), _AFTER + 1)
    else:
        anchors = [0] * len(lists)
        centre = 0 if error is None else error[1]
        start = 0 if longest <= _WHOLE else max(0, centre - _BEFORE)
        rows = range(start, min(longest, start + _WHOLE if error is None else centre + _AFTER) + 1)
        if longest <= _WHOLE:
            rows = range(longest + (error is not None and error[1] >= longest))
    columns = [
        [f"stage {stage}", *(_cell(lists, stage, anchors[stage] + row, error) for row in rows)]
        for stage in range(len(lists))
    ]
    labels = ["", *(_label(row, relative=progress is not None) for row in rows)]
    return _align([labels, *columns])


def _cell(lists: ActionLists, stage: int, index: int, error: tuple[int, int] | None) -> str:
    actions = lists[stage]
    if 0 <= index < len(actions):
        text = str(actions[index])
    else:
        text = "(end)" if index == len(actions) else ""
    return f"{text or '(none)'} {MARK}" if error == (stage, index) else text


def _label(row: int, *, relative: bool) -> str:
    if not relative:
        return str(row)
    return "now" if row == 0 else f"{row:+d}"


def _align(columns: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        first = cells[0].rjust(widths[0])
        rest = (cell.ljust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        lines.append("  ".join((first, *rest)).rstrip())
    return "\n".join(lines)
