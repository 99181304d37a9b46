"""Layer state to storage and back, in the foreground or behind training's back.

A layer's state is a flat dict: `param/<name>`, `buffer/<name>`, `optim/<param>/<key>`.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.storage import REMOTE_TIMEOUT_S, SLOWEST_BYTES_PER_S
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile, Manifest
from elastic_trainer.checkpoint.tensor_file import decode, encode
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import LayerName

LayerState = Mapping[str, Tensor]
STUCK_S = 2 * REMOTE_TIMEOUT_S  # longer than the storage's own limit, which has the better message


def snapshot(tensors: LayerState) -> dict[str, Tensor]:
    """A copy on the host that training cannot change any more."""
    copies = {name: _host_copy(tensor.detach()) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _host_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def write_layer(
    store: CheckpointStore, update: int, index: int, name: LayerName, tensors: LayerState
) -> LayerFile:
    """Write one layer's state; the tensors must not change meanwhile.

    Raises:
        CheckpointError: the storage refused or is full; names layer and file.
    """
    host = {key: tensor.detach().to("cpu") for key, tensor in tensors.items()}
    chunks = encode(host, {"format": "pt", "layer": name, "update": str(update)})
    return store.write_layer_file(update, index, name, chunks)


def read_layer(store: CheckpointStore, manifest: Manifest, name: LayerName) -> dict[str, Tensor]:
    """One layer's state, checked against its digest.

    Raises:
        CheckpointError: no such layer, or its file is missing, cut short or altered.
    """
    content = store.read_layer_file(manifest, name)
    try:
        return decode(content)
    except ValueError as error:
        raise CheckpointError(
            f"layer {name!r} of update {manifest.update} is not a safetensors file: {error}",
            "It was written so; resume from another checkpoint",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """How a save ended: all `files` written, or the error that stopped it."""

    update: int
    files: tuple[LayerFile, ...]
    error: CheckpointError | None
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.error is None


class BackgroundSaver:
    """Writes one worker's layers in a thread. One save at a time; errors are reported, not raised.

    A failed save keeps its snapshot, so `retry` can go on where it stopped; the next `save` gives
    it up and clears what it left on the storage. A save may take as long as it gets on: each layer
    has `stuck_s` seconds, and one more per megabyte.

    Args:
        store: where to write.
        layers: names of all layers of the model, in order.
        on_done: called in the writing thread when a save ends; must be quick and not raise.
        stuck_s: after how long a layer that is being written counts as stuck.
    """

    def __init__(
        self,
        store: CheckpointStore,
        layers: Sequence[LayerName],
        on_done: Callable[[SaveResult], None] | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._store = store
        self._stuck_s = stuck_s
        self._step = ("", 0.0, 0.0)  # what is being done, since when, until when at the latest
        self._index = {name: index for index, name in enumerate(layers)}
        self._on_done = on_done
        self._thread: threading.Thread | None = None
        self._update = 0
        self._pending: dict[LayerName, dict[str, Tensor]] = {}
        self._written: list[LayerFile] = []
        self._given_up: list[tuple[int, tuple[LayerFile, ...]]] = []
        self._result: SaveResult | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def result(self) -> SaveResult | None:
        """How the latest save or retry ended; None while it runs or before the first."""
        return None if self.busy else self._result

    def save(self, update: int, states: Mapping[LayerName, LayerState]) -> bool:
        """Copy these layers now, in the caller's thread, and write them behind its back.

        Returns:
            False, with nothing done, while an earlier save is still being written.
        """
        if self.busy:
            return False
        # Even whole files may have come to nothing, where another worker failed: what no manifest
        # lists is cleared. Not on a remote storage, where a manifest may still be on its way.
        if self._written and (self._pending or self._store.is_local):
            self._given_up.append((self._update, tuple(self._written)))
        self._update = update
        self._written = []
        self._pending = {name: snapshot(tensors) for name, tensors in states.items()}
        self._start()
        return True

    def retry(self) -> bool:
        """Write what the failed save could not. False where there is nothing to retry."""
        if self.busy or not self._pending:
            return False
        self._start()
        return True

    def wait(self, timeout_s: float) -> SaveResult | None:
        """The result of the save under way, or of the last one; None when the time is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.result

    def progress(self, update: int, wait_s: float) -> SaveProgress:
        """How the save of `update` stands, after waiting `wait_s` seconds at most for its end."""
        result = self.wait(wait_s)
        if result is None:
            what, since, latest = self._step
            now = time.monotonic()
            if now < latest:
                return SaveProgress(writing=True)
            return SaveProgress(
                writing=True,
                problem=f"{what}: the storage has not answered for {now - since:.0f} s",
            )
        if result.update != update:
            return SaveProgress(problem=f"the state after update {update} was not being saved")
        problem = str(result.error) if result.error else None
        return SaveProgress(files=result.files, problem=problem)

    def _begin(self, what: str, num_bytes: int = 0) -> None:
        now = time.monotonic()
        self._step = what, now, now + self._stuck_s + num_bytes / SLOWEST_BYTES_PER_S

    def _start(self) -> None:
        self._result = None
        self._begin(f"saving update {self._update}")
        # A daemon: a storage that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = time.monotonic()
        error: CheckpointError | None = None
        try:
            self._write_pending()
        except CheckpointError as caught:
            error = caught
        except Exception as caught:
            error = CheckpointError(
                f"cannot save update {self._update}: {type(caught).__name__}: {caught}"
            )
            error.__cause__ = caught
        self._result = SaveResult(
            update=self._update,
            files=tuple(self._written),
            error=error,
            wall_s=time.monotonic() - begin,
        )
        if self._on_done is not None:
            self._on_done(self._result)

    def _write_pending(self) -> None:
        # What an abandoned save wrote may be just what fills the disk.
        while self._given_up:
            self._begin(f"clearing what was left of update {self._given_up[-1][0]}")
            self._store.delete_layer_files(*self._given_up[-1])
            self._given_up.pop()
        for name in list(self._pending):
            self._begin(
                f"writing layer {name!r} of update {self._update}",
                sum(tensor.nbytes for tensor in self._pending[name].values()),
            )
            file = write_layer(
                self._store, self._update, self._index[name], name, self._pending[name]
            )
            self._written.append(file)
            del self._pending[name]
