"""The user's own files as samples: a folder, WebDataset archives, lists in JSON lines.

In folders and archives, files that share a name up to its suffix are one sample: pictures, sounds,
and the text in NAME.txt or in NAME.json under `text` or `caption`. A line of a list is a sample
whose values name files beside the list.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from elastic_trainer.data.media.bundles import Bundle, as_sample, check_names
from elastic_trainer.data.media.lists import Keys, list_samples
from elastic_trainer.data.media.raw import MediaFile, Problems, RawSample, RawSource
from elastic_trainer.data.media.tars import tar_bundles
from elastic_trainer.data.raw import Provenance
from elastic_trainer.errors import DataError

_TARS = (".tar", ".tar.gz", ".tgz")
_LISTS = (".jsonl", ".ndjson")
_INDEX = "metadata.jsonl"
_HOW = "Give folders, .tar archives and .jsonl lists"


@dataclass(frozen=True, slots=True)
class _Input:
    """One of the given files or folders, and what ids of its samples begin with."""

    path: Path
    prefix: str


def build(
    problems: Problems,
    files: Sequence[str] = (),
    image: str = "image",
    audio: str = "audio",
    text: str = "text",
    id: str = "id",
    require: str = "",
    licence: str = "unknown",
) -> RawSource:
    """Samples of the given files, in the order of their names.

    Args:
        problems: told of samples that lack something.
        files: folders, archives and lists; patterns such as `shards/*.tar` are resolved.
        image: key of pictures in a list.
        audio: key of sounds in a list.
        text: key of the text in a list, and in NAME.json.
        id: key of the name of a sample in a list; may be missing there.
        require: modalities that no sample may lack, such as `image,audio`.
        licence: what to record.
    """
    keys = Keys(image=image, audio=audio, text=text, id=id)
    required = check_names(require)
    inputs = _resolve(files)
    samples = [s for one in inputs for s in _samples(one, keys, required, problems)]
    if not samples:
        names = ", ".join(str(one.path) for one in inputs)
        first = "".join(f"; the first left out: {text}" for text in problems.first[:1])
        raise DataError(f"there are no samples in {names}{first}", _HOW)
    origins = [
        Provenance(
            package=one.path.name, version="files", licence=licence, sha256=_digest(one.path)
        )
        for one in inputs
    ]
    return RawSource(sources=origins, samples=samples)


def _resolve(files: Sequence[str]) -> list[_Input]:
    paths: list[Path] = []
    for given in files:
        if "://" in given:
            raise DataError(f"{given} is not a local file", "Copy it here first")
        path = Path(given).expanduser()
        found = [path] if path.exists() else sorted(map(Path, glob.glob(str(path))))
        if not found:
            raise DataError(f"there is no file or folder {given}", _HOW)
        paths += [one.absolute() for one in found]
    if not paths:
        raise DataError("no files are given", f"{_HOW}: elastic-trainer make-dataset from FILES")
    alone = len(paths) == 1
    return [_Input(path, "" if alone else f"{path.name}/") for path in paths]


def _samples(
    one: _Input, keys: Keys, required: Sequence[str], problems: Problems
) -> Iterator[RawSample]:
    path, name = one.path, one.path.name.lower()
    if path.is_dir() and not (path / _INDEX).is_file():
        bundles = _folder_bundles(path)
    elif name.endswith(_TARS):
        bundles = tar_bundles(path)
    elif path.is_dir() or name.endswith(_LISTS):
        index = path / _INDEX if path.is_dir() else path
        yield from list_samples(index, keys, one.prefix, required, problems)
        return
    else:
        raise DataError(f"{path} is neither a folder nor an archive nor a list", _HOW)
    for bundle in bundles:
        try:
            yield as_sample(bundle, one.prefix, keys.text, required)
        except DataError as error:
            problems.note(error)


def _folder_bundles(root: Path) -> Iterator[Bundle]:
    """Files of a folder and its subfolders, gathered by their name without the suffix."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        bundles: dict[str, Bundle] = {}
        for name in sorted(names):
            stem, suffix = os.path.splitext(name)
            if not name.startswith(".") and suffix:
                key = Path(folder, stem).relative_to(root).as_posix()
                bundle = bundles.setdefault(key, Bundle(key, str(root), []))
                path = Path(folder, name)
                file = MediaFile(path.relative_to(root).as_posix(), path.read_bytes)
                bundle.files.append((suffix.lower(), file))
        yield from bundles.values()


def _digest(path: Path) -> str:
    """Of names, sizes and times of change: enough to tell whether anything was replaced."""
    digest = sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        facts = file.stat()
        name = file.relative_to(path).as_posix()
        line = f"{name}\0{facts.st_size}\0{facts.st_mtime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))  # names of files may be any bytes
    return digest.hexdigest()
