"""What a run is to reach, with whom, and how much it puts up with."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Set once. Periods count updates, 0 means never; limits of -1 mean any number.

    `max_layers` is the most stages that are of use. `start_update` is the checkpoint to restore, 0
    for a new run. With `grid`, segments end at multiples of the updates that the plan names, since
    an asynchronous schedule drains there and results depend on it.
    """

    min_workers: int
    max_workers: int
    num_spares: int = 0
    max_layers: int = 1 << 30
    max_steps: int | None
    eval_steps: int
    save_steps: int
    start_update: int = 0
    final_eval: bool = True
    max_failures: int = 0
    max_preemptions: int = -1
    refill_updates: int = 100
    snapshot_every: int = 0
    grid: bool = False
