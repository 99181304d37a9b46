"""The phases of a run."""

from enum import StrEnum


class Phase(StrEnum):
    """Where the run stands."""

    STARTING = "starting"
    PLANNING = "planning"
    RESTORING = "restoring"
    RUNNING = "running"
    DRAINING = "draining"
    RECOVERING = "recovering"
    WAITING = "waiting"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"


WORKING = (Phase.RUNNING, Phase.DRAINING, Phase.FINISHING)  # a configured generation is at work
GATHERING = (Phase.STARTING, Phase.PLANNING, Phase.WAITING)  # no stage is held
