"""Layer state to storage and back, in the foreground or behind training's back.

A layer's state is a flat dict: `param/<name>`, `buffer/<name>`, `optim/<param>/<key>`.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile, Manifest
from elastic_trainer.checkpoint.tensor_file import decode, encode
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import LayerName

LayerState = Mapping[str, Tensor]


def snapshot(tensors: LayerState) -> dict[str, Tensor]:
    """A copy on the host that training cannot change any more."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


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
    it up and clears what it left on the storage.

    Args:
        store: where to write.
        layers: names of all layers of the model, in order.
        on_done: called in the writing thread when a save ends; must be quick and not raise.
    """

    def __init__(
        self,
        store: CheckpointStore,
        layers: Sequence[LayerName],
        on_done: Callable[[SaveResult], None] | None = None,
    ) -> None:
        self._store = store
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
        if self._pending and self._written:
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

    def _start(self) -> None:
        self._result = None
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
            self._store.delete_layer_files(*self._given_up[-1])
            self._given_up.pop()
        for name in list(self._pending):
            file = write_layer(
                self._store, self._update, self._index[name], name, self._pending[name]
            )
            self._written.append(file)
            del self._pending[name]
