"""The source text of the running Python's standard library: always present, nothing to fetch."""

import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from elastic_trainer.data.raw import Provenance, RawDocument
from elastic_trainer.errors import DataError

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def build(root: str | None = None) -> tuple[Provenance, list[RawDocument]]:
    """Documents of the standard library, one a file.

    Args:
        root: another folder of Python sources, instead of the running Python's.
    """
    folder = Path(root or sysconfig.get_paths()["stdlib"])
    documents = list(_read(folder))
    if not documents:
        raise DataError(
            f"there are no Python sources in {folder}",
            "This Python ships its standard library without sources; use another Python, or "
            "`elastic-trainer make-dataset gcide`",
        )
    digest = sha256()
    for document in documents:
        digest.update(f"{document.name}\0{document.text}\0".encode())
    provenance = Provenance(
        package="python standard library" if root is None else folder.name,
        version=platform.python_version(),
        licence="PSF-2.0" if root is None else "unknown",
        sha256=digest.hexdigest(),
    )
    return provenance, documents


def _read(root: Path) -> Iterator[RawDocument]:
    """Each source file that holds text, in sorted order, decoded as its coding line says."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix != ".py":
                continue
            try:
                with tokenize.open(path) as source:
                    text = source.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                # Unreadable to the interpreter, so to us: no part of the library proper.
                continue
            if text.strip():
                yield RawDocument(name=path.relative_to(root).as_posix(), text=text)
