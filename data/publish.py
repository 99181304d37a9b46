"""Putting a dataset's folder in its place: whole or not at all, and never over anything else."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.data.raw import Provenance
from elastic_trainer.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """What `dataset.json` records; `digest` covers every row of both splits.

    The last fields are about pictures and sound: in how many rows each is, files left out because
    they could not be read and what was wrong with the first of them, further packages.
    """

    name: str
    path: str
    num_rows: int
    num_eval_rows: int
    num_chars: int
    vocab_size: int
    eos_id: int
    digest: str
    source: Provenance
    arguments: dict[str, Any] = field(default_factory=dict)
    reused: bool = False
    rows_with: dict[str, int] = field(default_factory=dict)
    audio_s: float = 0.0
    num_skipped: int = 0
    skipped: list[str] = field(default_factory=list)
    more_sources: list[Provenance] = field(default_factory=list)


def reusable(folder: Path, arguments: Mapping[str, Any], overwrite: bool) -> DatasetInfo | None:
    """The dataset in `folder` if it is the one asked for; refuse to touch anything else."""
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
        facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        facts["source"] = Provenance(**facts["source"])
        facts["more_sources"] = [Provenance(**more) for more in facts.get("more_sources", ())]
        info = DatasetInfo(**{**facts, "path": str(folder), "reused": True})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise DataError(
            f"{folder} exists and is not a dataset built here", "Choose another folder"
        ) from None
    if info.arguments == arguments and _is_whole(folder):
        return info
    if not overwrite:
        different = [name for name in arguments if info.arguments.get(name) != arguments[name]]
        raise DataError(
            f"{folder} holds a dataset ({info.name}) that differs from the one asked for in "
            f"{', '.join(different) or 'missing files'}",
            "Choose another folder, remove it, or pass overwrite",
        )
    return None


def _is_whole(folder: Path) -> bool:
    splits = [list((folder / "data").glob(f"{split}-*.parquet")) for split in ("train", "eval")]
    return (folder / "tokenizer.json").is_file() and all(splits)


def publish(folder: Path, write: Callable[[Path], DatasetInfo]) -> DatasetInfo:
    """Let `write` fill a folder beside the final place, record what it made, and rename it."""
    mark = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    building = folder.with_name(f".{folder.name}.building-{mark}")
    try:
        (building / "data").mkdir(parents=True)
        info = write(building)
        facts = json.dumps(asdict(info), indent=2, sort_keys=True)
        (building / "dataset.json").write_text(facts + "\n", encoding="utf-8")
        if folder.exists():
            replaced = folder.with_name(f".{folder.name}.replaced-{mark}")
            os.replace(folder, replaced)
            os.replace(building, folder)
            shutil.rmtree(replaced)
        else:
            os.replace(building, folder)
    except OSError as error:
        raise DataError(
            f"cannot write the dataset {folder}: {error.strerror or error}",
            "Check free space and permissions, or choose another folder",
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return info
