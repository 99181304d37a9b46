"""Every error that elastic-trainer raises on purpose.

    ElasticTrainerError
    ├── ConfigError          a setting is unknown, malformed or contradicts another
    ├── DataError            a dataset is missing, empty, damaged or has the wrong columns
    │   └── PackingError     a sample is too long for any microbatch
    ├── ModelError           a model or loss cannot be imported, split or run
    ├── ScheduleError        a schedule is invalid: deadlock, missing action, wrong staleness
    ├── PlanError            no plan fits: more stages than layers, too little memory
    ├── ClusterError         the cluster cannot host the run: no room, no node, unreachable
    │   └── AuthenticationError  the Ray token is missing or wrong
    ├── TransportError       a peer is unreachable, a message is malformed or not authenticated
    │   ├── StallError       a bounded wait ran out
    │   └── FencedError      a message or request of an older generation
    ├── WorkerLostError      a worker died or stopped answering
    ├── NonFiniteError       a loss, activation or gradient became NaN or infinite
    ├── CheckpointError      a checkpoint is missing, incomplete or damaged
    └── RunError             a run does not exist, has ended, or is already being written to

Messages say what went wrong, where, and what to do next. Errors cross process borders, so every
class here survives pickling: fields go to the base class, text is formatted in `__str__`.
"""


class ElasticTrainerError(Exception):
    """Base of all errors of this package.

    Args:
        what: what went wrong and where, one sentence without a full stop.
        hint: what to do next; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}. {self.hint}" if self.hint else self.what


class ConfigError(ElasticTrainerError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = 2


class DataError(ElasticTrainerError):
    """A dataset is missing, empty, damaged or has the wrong columns."""


class PackingError(DataError):
    """A sample is too long for any microbatch; `index` is its place among those to be packed."""

    def __init__(self, what: str, hint: str = "", index: int = -1) -> None:
        Exception.__init__(self, what, hint, index)
        self.what = what
        self.hint = hint
        self.index = index


class ModelError(ElasticTrainerError):
    """A model or loss cannot be imported, split or run."""


class ScheduleError(ElasticTrainerError):
    """A schedule is invalid; `what` carries the place, the grid of actions may follow."""


class PlanError(ElasticTrainerError):
    """No plan fits the model, the workers and the limits."""


class ClusterError(ElasticTrainerError):
    """The cluster cannot host the run."""


class AuthenticationError(ClusterError):
    """The Ray token is missing or wrong."""


class TransportError(ElasticTrainerError):
    """A peer is unreachable, or a message is malformed or not authenticated."""


class StallError(TransportError):
    """A bounded wait ran out."""


class FencedError(TransportError):
    """A message or request belongs to an older generation and is refused."""


class WorkerLostError(ElasticTrainerError):
    """A worker died or stopped answering; `what` names it and its stage."""


class NonFiniteError(ElasticTrainerError):
    """A loss, activation or gradient became NaN or infinite.

    Args:
        what: the sentence.
        hint: what to do.
        update: the update that would have applied it.
        microbatch: index within the batch.
        layer: name of the first layer whose output is not finite ("loss" for the loss itself).
        stage: stage that holds that layer.
    """

    def __init__(
        self,
        what: str,
        hint: str = "",
        update: int = -1,
        microbatch: int = -1,
        layer: str = "",
        stage: int = -1,
    ) -> None:
        Exception.__init__(self, what, hint, update, microbatch, layer, stage)
        self.what = what
        self.hint = hint
        self.update = update
        self.microbatch = microbatch
        self.layer = layer
        self.stage = stage


class CheckpointError(ElasticTrainerError):
    """A checkpoint is missing, incomplete or damaged."""


class RunError(ElasticTrainerError):
    """A run does not exist, has ended, or is already being written to."""
