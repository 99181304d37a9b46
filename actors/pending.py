"""Results of remote calls that may not be there yet.

A call through a handle returns a `Pending`; `wait_any` blocks until some of them are ready.
"""

import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from elastic_trainer.errors import ElasticTrainerError, WorkerLostError
from elastic_trainer.types import WorkerId

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a remote call that may not be there yet.

    `line` names the calls that wait for each other; see `watch.py`.
    """

    def __init__(self, ref: Any, worker: WorkerId, line: str) -> None:
        self.ref = ref
        self.worker = worker
        self.line = line

    def get(self, timeout_s: float) -> T:
        """The result.

        Raises:
            WorkerLostError: the actor is dead or unreachable.
            ElasticTrainerError: what the call raised, if it was one of ours.
            TimeoutError: no answer within `timeout_s` seconds.
        """
        try:
            value: T = ray.get(self.ref, timeout=timeout_s)
            return value
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{self.worker} did not answer in {timeout_s:.0f} s") from error
        except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
            raise _actor_error(self.worker, error) from error
        except RayTaskError as error:
            if isinstance(error.cause, ElasticTrainerError):
                raise error.cause from None
            raise


def wait_any(pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
    """Those that are ready, after `timeout_s` seconds at most."""
    if not pending:
        return []
    by_ref = {p.ref: p for p in pending}
    ready, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s, fetch_local=True)
    if ready:  # take along what came at the same time
        ready, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
    return [by_ref[ref] for ref in ready]


def _actor_error(worker: WorkerId, error: RayActorError) -> ElasticTrainerError:
    """What a dead actor's constructor raised, if it was one of ours; else that it is lost."""
    cause = getattr(error.args[0], "cause", None) if error.args else None
    if isinstance(cause, ElasticTrainerError):
        return cause
    if isinstance(cause, Exception):
        said = next((line for line in str(cause).splitlines() if line.strip()), "no message")
        return WorkerLostError(f"{worker} could not start: {type(cause).__name__}: {said}")
    return WorkerLostError(f"{worker} is gone: {_why(error)}")


def _why(error: RayActorError) -> str:
    """What Ray knows of an actor's end, in a few words."""
    text = str(error)
    if "unexpectedly exits with a connection error" in text:
        pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
        return (
            f"its process{f' {pid[1]}' if pid else ''} was killed (SIGKILL, as when memory runs "
            "out) or crashed (SIGSEGV)"
        )
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line or "killed" in line.lower()), lines[0])
