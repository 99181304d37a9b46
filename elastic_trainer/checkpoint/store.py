"""Checkpoints on storage: one folder per update, one file per layer, a manifest written last.

    step-00000100/
        layer-0000-embed-3f2a….safetensors     parameters, buffers, optimizer state of one layer
        layer-0001-blocks.0-91bc….safetensors
        manifest.json                          names, sizes, digests, data position

A folder without a readable manifest is no checkpoint: its save was cut off. File names carry the
digest of the content, so saving the same update again never touches a file that an earlier manifest
lists. No torch here: the coordinator, which holds no tensors, writes the manifests.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint.storage import REMOTE_TIMEOUT_S, Buffer, Storage, storage_errors
from elastic_trainer.errors import CheckpointError, ConfigError
from elastic_trainer.types import CheckpointInfo, Cursor, LayerName

FORMAT = "elastic-trainer-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SUPERSEDED = "manifest.superseded.json"

_FOLDER = re.compile(r"step-(\d{8,})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFile:
    """One layer's file, as its writer reports it. `index` is the layer's place in the model."""

    index: int
    name: LayerName
    file: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a complete checkpoint holds. `extra` is JSON: whatever the run needs to go on."""

    update: int
    created_at: float
    cursor: Cursor
    layers: tuple[LayerFile, ...]
    extra: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def layer(self, name: LayerName) -> LayerFile:
        """The file of one layer, by the layer's name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        known = ", ".join(layer.name for layer in self.layers)
        raise CheckpointError(
            f"the checkpoint of update {self.update} has no layer {name!r}",
            f"It was written by another model; it holds: {known}",
        )


class _Unreadable(Exception):
    """A manifest is cut short or altered."""


class CheckpointStore:
    """The checkpoints of one run.

    Any number of processes may write layers of one update at a time. One process, the coordinator,
    calls what changes the set of checkpoints: `commit`, `prune`, `discard`, `supersede_after`.

    Args:
        root: local folder or URI of `pyarrow.fs`; need not exist.
        clock: seconds since the epoch.
        timeout_s: limit on one call to a remote place; data gets a second per megabyte more.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        timeout_s: float = REMOTE_TIMEOUT_S,
    ) -> None:
        self.storage = Storage(root, timeout_s)
        self._clock = clock

    @property
    def root(self) -> str:
        """Where the checkpoints lie, good for another `CheckpointStore`."""
        return self.storage.address()

    @property
    def is_local(self) -> bool:
        """Whether calls act at once or not at all, as on this machine's file systems."""
        return self.storage.is_local

    def layer_path(self, update: int, index: int, name: LayerName, sha256: str) -> str:
        """Where a layer's content belongs, relative to the root. Any layer name is fine."""
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60]
        return f"{_folder(update)}/layer-{index:04d}-{readable}-{sha256[:16]}.safetensors"

    def write_layer_file(
        self, update: int, index: int, name: LayerName, chunks: Sequence[Buffer]
    ) -> LayerFile:
        """Write the bytes of one layer.

        Raises:
            CheckpointError: the storage refused, the disk is full; names layer and file.
        """
        digest, num_bytes = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            num_bytes += len(chunk)
        sha256 = digest.hexdigest()
        path = self.layer_path(update, index, name, sha256)
        with storage_errors(f"cannot write layer {name!r} to {self.storage.label(path)}"):
            self.storage.write(path, chunks)
        file = path.rpartition("/")[2]
        return LayerFile(index=index, name=name, file=file, num_bytes=num_bytes, sha256=sha256)

    def read_layer_file(self, manifest: Manifest, name: LayerName) -> bytes:
        """The bytes of one layer, checked against the manifest.

        Raises:
            CheckpointError: the file is missing, cut short or altered; names layer and file.
        """
        layer = manifest.layer(name)
        path = f"{_folder(manifest.update)}/{layer.file}"
        where = f"layer {name!r} in {self.storage.label(path)}"
        with storage_errors(f"cannot read {where}"):
            content = self.storage.read(path)
        if len(content) != layer.num_bytes:
            fault = f"it holds {len(content)} bytes instead of {layer.num_bytes}"
        elif hashlib.sha256(content).hexdigest() != layer.sha256:
            fault = "its content does not match its digest"
        else:
            return content
        raise CheckpointError(f"{where} is damaged: {fault}", self._others(manifest.update))

    def _others(self, update: int) -> str:
        """What to resume from instead of a damaged checkpoint."""
        try:
            older = [m for m in self._manifests() if m.update < update]
            whole = [m.update for m in older if not self.faults(m)]
        except CheckpointError:
            return "Resume from another checkpoint: `--resume PATH` takes its folder"
        if not whole:
            return f"There is no older complete checkpoint in {self.storage.label()}"
        known = ", ".join(map(str, whole))
        return f"Resume from an older one with `--resume {whole[-1]}`; there are: {known}"

    def commit(
        self,
        update: int,
        files: Iterable[LayerFile],
        *,
        cursor: Cursor,
        extra: Mapping[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Make a checkpoint of written layers: check that they are all there, then the manifest.

        Raises:
            CheckpointError: a layer is missing, written twice or not as reported.
        """
        layers = tuple(sorted(files, key=lambda layer: layer.index))
        if [layer.index for layer in layers] != list(range(len(layers))) or not layers:
            raise CheckpointError(
                f"the checkpoint of update {update} is not complete: "
                f"layers {[layer.index for layer in layers]} were written"
            )
        manifest = Manifest(
            update=update,
            created_at=self._clock(),
            cursor=cursor,
            layers=layers,
            extra=dict(extra or {}),
        )
        faults = self.faults(manifest)
        if faults:
            raise CheckpointError(f"the checkpoint of update {update} is not complete: {faults[0]}")
        path = f"{_folder(update)}/{MANIFEST}"
        with storage_errors(f"cannot write {self.storage.label(path)}"):
            self.storage.write(path, [_encode(manifest)])
        return self._info(manifest)

    def list(self) -> Sequence[CheckpointInfo]:
        """All complete checkpoints, oldest first."""
        return [self._info(manifest) for manifest in self._manifests()]

    def newest(self) -> CheckpointInfo | None:
        """The complete checkpoint of the highest update."""
        return next(
            (self._info(m) for m in map(self._try_manifest, self._updates(newest_first=True)) if m),
            None,
        )

    def manifest(self, update: int) -> Manifest:
        """The manifest of one complete checkpoint.

        Raises:
            CheckpointError: there is none, it is damaged, or of a newer version of this program.
        """
        label = self.storage.label(_folder(update))
        try:
            manifest = self._read_manifest(update)
        except _Unreadable as error:
            raise CheckpointError(
                f"{label}/{MANIFEST} is damaged: {error}", "Resume from another checkpoint"
            ) from error
        if manifest is None:
            known = ", ".join(str(info.update) for info in self.list()) or "none"
            raise CheckpointError(
                f"there is no complete checkpoint of update {update} in {self.storage.label()}",
                f"Complete checkpoints: {known}",
            )
        return manifest

    def faults(self, manifest: Manifest) -> Sequence[str]:
        """Files of a checkpoint that are missing or of the wrong size; reads no content."""
        folder = _folder(manifest.update)
        with storage_errors(f"cannot read {self.storage.label(folder)}"):
            sizes = {entry.name: entry.num_bytes for entry in self.storage.entries(folder)}
        return [
            f"layer {layer.name!r} in {self.storage.label(folder)}/{layer.file} "
            + (f"holds {sizes[layer.file]} bytes" if layer.file in sizes else "is missing")
            + (f" instead of {layer.num_bytes}" if layer.file in sizes else "")
            for layer in manifest.layers
            if sizes.get(layer.file) != layer.num_bytes
        ]

    def prune(self, num_to_keep: int) -> Sequence[int]:
        """Keep the newest `num_to_keep` complete checkpoints; return the updates deleted.

        Also clears what killed saves left behind, but nothing newer than the newest complete
        checkpoint: that may be a save in progress.
        """
        if num_to_keep < 1:
            raise ConfigError(f"checkpoint.num_to_keep is {num_to_keep}", "Keep at least 1")
        complete = {manifest.update: manifest for manifest in self._manifests()}
        kept = sorted(complete)[-num_to_keep:]
        deleted = []
        for update in self._updates():
            if not kept or update >= kept[-1]:
                continue
            if update in kept:
                self._delete_strays(complete[update])
            else:
                self._delete(update)
                deleted.append(update)
        return deleted

    def discard(self, update: int) -> None:
        """Delete what a save that will not be completed has written. Complete ones stay."""
        if self._try_manifest(update) is None:
            self._delete(update)

    def delete_layer_files(self, update: int, files: Iterable[LayerFile]) -> None:
        """Delete single files of a save that was given up, unless a manifest lists them."""
        manifest = self._try_manifest(update)
        listed = {layer.file for layer in manifest.layers} if manifest else set()
        for layer in files:
            if layer.file not in listed:
                path = f"{_folder(update)}/{layer.file}"
                with storage_errors(f"cannot delete {self.storage.label(path)}"):
                    self.storage.delete(path)

    def supersede_after(self, update: int) -> Sequence[int]:
        """Set aside all checkpoints after `update`, for a run that goes on from there.

        Otherwise the abandoned ones would count as newest. They stay readable by hand
        (`manifest.superseded.json`) until `prune` passes them.
        """
        superseded = [u for u in self._updates() if u > update and self._has_manifest(u)]
        for later in superseded:
            folder = _folder(later)
            with storage_errors(f"cannot set aside {self.storage.label(folder)}"):
                self.storage.rename(f"{folder}/{MANIFEST}", f"{folder}/{SUPERSEDED}")
        return superseded

    def _updates(self, *, newest_first: bool = False) -> Sequence[int]:
        with storage_errors(f"cannot list {self.storage.label()}"):
            entries = self.storage.entries()
        matches = [_FOLDER.fullmatch(entry.name) for entry in entries if entry.is_folder]
        return sorted((int(match[1]) for match in matches if match), reverse=newest_first)

    def _has_manifest(self, update: int) -> bool:
        path = f"{_folder(update)}/{MANIFEST}"
        with storage_errors(f"cannot read {self.storage.label(path)}"):
            return self.storage.exists(path)

    def _manifests(self) -> Sequence[Manifest]:
        return [m for m in map(self._try_manifest, self._updates()) if m is not None]

    def _try_manifest(self, update: int) -> Manifest | None:
        """A manifest, or None where the save was cut off; a damaged one is logged."""
        try:
            return self._read_manifest(update)
        except _Unreadable as error:
            _log.warning("ignoring %s: %s", self.storage.label(f"{_folder(update)}"), error)
            return None

    def _read_manifest(self, update: int) -> Manifest | None:
        if not self._has_manifest(update):
            return None
        path = f"{_folder(update)}/{MANIFEST}"
        with storage_errors(f"cannot read {self.storage.label(path)}"):
            content = self.storage.read(path)
        return _decode(content, self.storage.label(path))

    def _delete(self, update: int) -> None:
        folder = _folder(update)
        with storage_errors(f"cannot delete {self.storage.label(folder)}"):
            # The manifest first: a deletion that is cut off must not leave a complete-looking rest.
            self.storage.delete(f"{folder}/{MANIFEST}")
            self.storage.delete_folder(folder)

    def _delete_strays(self, manifest: Manifest) -> None:
        folder = _folder(manifest.update)
        listed = {MANIFEST} | {layer.file for layer in manifest.layers}
        with storage_errors(f"cannot clean {self.storage.label(folder)}"):
            for entry in self.storage.entries(folder):
                if not entry.is_folder and entry.name not in listed:
                    self.storage.delete(f"{folder}/{entry.name}")

    def _info(self, manifest: Manifest) -> CheckpointInfo:
        return CheckpointInfo(
            update=manifest.update,
            path=self.storage.address(_folder(manifest.update)),
            num_bytes=manifest.num_bytes,
            created_at=manifest.created_at,
        )


def folder_update(name: str) -> int | None:
    """The update in a checkpoint folder's name; None for other names."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def _folder(update: int) -> str:
    return f"step-{update:08d}"


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(manifest: Manifest) -> bytes:
    # Through JSON once, so that what is digested is what a reader will see.
    body = json.loads(
        json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)})
    )
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()


def _decode(content: bytes, label: str) -> Manifest:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise _Unreadable("it is not whole JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _Unreadable("it is not a manifest of elastic-trainer")
    version = body.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{label} has format version {version}; this program reads up to {FORMAT_VERSION}",
            "Update elastic-trainer, or point checkpoint.storage_path at another folder",
        )
    if body.pop("digest", None) != _digest(body):
        raise _Unreadable("its content does not match its digest")
    layers = tuple(LayerFile(**layer) for layer in body["layers"])
    if any(re.search(r"[/\\]|^\.*$", layer.file) for layer in layers):
        raise _Unreadable("it names files outside its folder")
    return Manifest(
        update=body["update"],
        created_at=body["created_at"],
        cursor=Cursor(**body["cursor"]),
        layers=layers,
        extra=body["extra"],
    )
