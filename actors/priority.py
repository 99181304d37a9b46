"""Who runs first where stages and control share cores."""

import os

CONTROL_NICENESS = 5


def yield_to_compute() -> None:
    """Let stages on this node run first: control fits into the time in which they wait."""
    os.nice(CONTROL_NICENESS)
