"""Exchange of schedules with torch.distributed.pipelining: CSV, one row per rank.

Its notation knows forward, backward and the messages between neighbours. What it has no word for is
left out on writing: OPT, REDUCE and tied parameters. Sharding actions of theirs (UNSHARD, RESHARD,
REDUCE_GRAD) move no activations and are left out on reading; split backwards and several stages on
one rank are refused.
"""

import csv
import io
import re

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import Action, ActionLists, Kind

_COMPUTE = frozenset({Kind.F, Kind.B})
_SHARED = _COMPUTE | {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
_IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_SPLIT = re.compile(r"\d+[IW]\d+|\(.*\)OVERLAP_F_B")


def to_csv(lists: ActionLists, comms: bool) -> str:
    """The schedule as torch reads it: `compute_comms` format if `comms`, else `compute_only`."""
    kinds = _SHARED if comms else _COMPUTE
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in lists:
        writer.writerow([str(action) for action in actions if action.kind in kinds])
    return text.getvalue()


def from_csv(text: str) -> ActionLists:
    """The actions of a schedule that torch wrote, without its idle cells."""
    return tuple(
        tuple(action for cell in row if (action := _read(cell.strip(), rank)) is not None)
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    )


def _read(cell: str, rank: int) -> Action | None:
    if not cell or _IGNORED.fullmatch(cell):
        return None
    if _SPLIT.fullmatch(cell):
        raise ScheduleError(
            f"rank {rank} splits or overlaps backwards ({cell})", "Use a schedule of plain F and B"
        )
    action = Action.parse(cell)
    if action.kind not in _SHARED or action.peer is not None:
        raise ScheduleError(f"{cell} on rank {rank} is not in torch's notation")
    if action.stage != rank:
        raise ScheduleError(
            f"rank {rank} holds stage {action.stage} ({cell})",
            "Use a schedule with one stage per rank, in order",
        )
    return action
