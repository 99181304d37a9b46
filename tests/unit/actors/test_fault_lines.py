"""An error that nobody raised on purpose becomes one line that says what, who and when."""

import threading
import traceback

import pytest
import torch
from ray.exceptions import RayTaskError

from elastic_trainer.actors.faults import one_line
from elastic_trainer.config import Config
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan
from elastic_trainer.testing.toys import tiny_gpt, token_batches

WHERE = "stage-1 (stage 1, node 10.0.0.7)"


class Unsendable(Exception):
    """As raised by libraries that keep a lock or a socket in their errors."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def failed(error: Exception, update: int = 2) -> Exception:
    """What a run fails with when `error` is raised in the optimizer step of `update` on stage 1."""

    def before(action: Action) -> None:
        if action.kind is Kind.OPT and action.microbatch == 3 * update - 1:
            raise error

    model = tiny_gpt()
    pipeline = InProcessPipeline(
        model, Config(), even_plan(model, 2, "1f1b"), token_batches(3),
        hooks={1: RuntimeHooks(before=before)},
    )  # fmt: skip
    with pytest.raises(type(error)):
        pipeline.train(1, 3)
    pipeline.close()
    return error


def remote(error: Exception) -> Exception:
    """The error as Ray raises it to the caller."""
    text = "".join(traceback.format_exception(error))
    told = RayTaskError("run_segment", text, error, "ray::StageWorker", 1, "10.0.0.7")  # type: ignore[no-untyped-call]
    raised: Exception = told.as_instanceof_cause()  # type: ignore[no-untyped-call]
    return raised


def test_a_missing_key() -> None:
    error = remote(failed(KeyError("exp_avg")))
    assert one_line(error, WHERE) == f"KeyError: 'exp_avg' on {WHERE} at update 2"
    assert "<-- HERE" in str(error), "the event has the grid"


def test_no_memory_left() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the docs.")
    line = one_line(remote(failed(error, 3)), WHERE)
    assert line == (
        f"OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. on {WHERE} at update 3"
    )


def test_an_assertion_without_words_names_its_place() -> None:
    line = one_line(remote(failed(AssertionError())), WHERE)
    assert line.startswith("AssertionError in test_fault_lines.py:")
    assert line.endswith(f" on {WHERE} at update 2")


def test_an_error_that_cannot_be_sent() -> None:
    line = one_line(remote(failed(Unsendable("the socket is closed"))), WHERE)
    assert line == f"Unsendable: the socket is closed on {WHERE} at update 2"


def test_outside_a_segment_and_without_ray() -> None:
    assert one_line(remote(ValueError("no such layer")), WHERE) == (
        f"ValueError: no such layer on {WHERE}"
    )
    assert one_line(OSError(28, "No space left")) == "OSError: [Errno 28] No space left"
    assert len(one_line(ValueError("x" * 5000))) < 320
