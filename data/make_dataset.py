"""Building a dataset: documents from a source, split, tokenizer, Parquet shards, and a record.

A dataset is a folder:

    data/train-00000-of-00001.parquet   text, source, text_chars; Hugging Face layout
    data/eval-00000-of-00001.parquet    held-out documents
    tokenizer.json                      byte-level BPE trained on the training documents
    dataset.json                        what it is, where it came from, digests; written last

Building twice with the same arguments gives the same content. The folder appears whole or not at
all: it is built under another name beside its place and renamed.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_trainer.data import gcide, stdlib_text
from elastic_trainer.data.raw import Provenance, RawDocument
from elastic_trainer.data.tokenizer import Tokenizer, train_bpe
from elastic_trainer.errors import DataError

Builder = Callable[..., tuple[Provenance, Iterable[RawDocument]]]

# Each builder takes its own keyword arguments and returns the provenance and the documents.
BUILDERS: dict[str, Builder] = {"stdlib-text": stdlib_text.build, "gcide": gcide.build}

SHARD_BYTES = 64 << 20
ROW_GROUP_BYTES = 8 << 20
TOKENIZER_SAMPLE_CHARS = 8_000_000
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """What `dataset.json` records; `digest` covers every row of both splits."""

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


def make_dataset(
    kind: str,
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    eval_fraction: float = 0.05,
    seed: int = 0,
    overwrite: bool = False,
    **source: Any,
) -> DatasetInfo:
    """Build a dataset, or return the one that the same call built before.

    Args:
        kind: a key of `BUILDERS`.
        out: folder to create.
        vocab_size: entries of the tokenizer's vocabulary.
        eval_fraction: share of documents held out, chosen by (seed, document name).
        seed: of the split.
        overwrite: replace a dataset in `out` that was built otherwise.
        source: arguments of the builder, such as `deb` for gcide.
    """
    builder = BUILDERS.get(kind)
    if builder is None:
        raise DataError(
            f"there is no dataset called {kind!r}", f"Available are {', '.join(BUILDERS)}"
        )
    if not 0 < eval_fraction < 1:
        raise DataError(f"eval_fraction is {eval_fraction}", "Choose one between 0 and 1")
    folder = Path(out).expanduser().absolute()
    provenance, documents = builder(**source)
    arguments = {
        "format": _FORMAT,
        "kind": kind,
        "vocab_size": vocab_size,
        "eval_fraction": eval_fraction,
        "seed": seed,
        "source": asdict(provenance),
    }
    reusable = _reusable(folder, arguments, overwrite)
    if reusable is not None:
        return reusable
    train, held_out = split_documents(documents, eval_fraction=eval_fraction, seed=seed)
    tokenizer = train_bpe(sample_texts([d.text for d in train]), vocab_size)
    info = _describe(folder, provenance, arguments, train, held_out, tokenizer)
    _publish(folder, info, train, held_out, tokenizer)
    return info


def _describe(
    folder: Path,
    provenance: Provenance,
    arguments: dict[str, Any],
    train: Sequence[RawDocument],
    held_out: Sequence[RawDocument],
    tokenizer: Tokenizer,
) -> DatasetInfo:
    assert tokenizer.eos_id is not None  # train_bpe always defines it
    return DatasetInfo(
        name=arguments["kind"],
        path=str(folder),
        num_rows=len(train),
        num_eval_rows=len(held_out),
        num_chars=sum(len(d.text) for d in [*train, *held_out]),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        digest=_digest(train, held_out),
        source=provenance,
        arguments=arguments,
    )


def split_documents(
    documents: Iterable[RawDocument], *, eval_fraction: float, seed: int
) -> tuple[list[RawDocument], list[RawDocument]]:
    """Training and held-out documents. A document's side depends on its name and the seed alone;
    only where one side would be empty does the document nearest to the limit change over."""
    scored = sorted(((_score(seed, d.name), d) for d in documents), key=lambda s: s[0])
    if len(scored) < 2:
        raise DataError(
            f"the source holds {len(scored)} document(s); a dataset needs 2, one held out",
            "Check the source",
        )
    num_held_out = sum(score < eval_fraction for score, _ in scored)
    num_held_out = min(max(num_held_out, 1), len(scored) - 1)
    held_out = [d for _, d in scored[:num_held_out]]
    train = [d for _, d in scored[num_held_out:]]
    return sorted(train, key=lambda d: d.name), sorted(held_out, key=lambda d: d.name)


def sample_texts(texts: Sequence[str], limit: int = TOKENIZER_SAMPLE_CHARS) -> list[str]:
    """Every n-th text, n so large that about `limit` characters remain: enough for merges."""
    step = -(-sum(map(len, texts)) // limit)
    return list(texts[:: max(step, 1)])


def _score(seed: int, name: str) -> float:
    digest = sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _digest(train: Sequence[RawDocument], held_out: Sequence[RawDocument]) -> str:
    digest = sha256()
    for split, documents in (("train", train), ("eval", held_out)):
        for document in documents:
            for part in (split, document.name, document.text):
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _reusable(folder: Path, arguments: dict[str, Any], overwrite: bool) -> DatasetInfo | None:
    """The dataset in `folder` if it is the one asked for; refuse to touch anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        source = Provenance(**facts.pop("source"))
        info = DatasetInfo(**{**facts, "source": source, "path": str(folder), "reused": True})
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


def _publish(
    folder: Path,
    info: DatasetInfo,
    train: Sequence[RawDocument],
    held_out: Sequence[RawDocument],
    tokenizer: Tokenizer,
) -> None:
    mark = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    building = folder.with_name(f".{folder.name}.building-{mark}")
    try:
        (building / "data").mkdir(parents=True)
        write_shards(building / "data", "train", train)
        write_shards(building / "data", "eval", held_out)
        (building / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
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


def write_shards(folder: Path, split: str, documents: Sequence[RawDocument]) -> None:
    """Write one split as `SPLIT-00000-of-0000N.parquet`, in small row groups that seek well."""
    shards = _chunks(documents, SHARD_BYTES)
    types: Any = {"text": pa.string(), "source": pa.string(), "text_chars": pa.int64()}
    schema = pa.schema(types, metadata={"huggingface": json.dumps(_FEATURES)})
    for number, shard in enumerate(shards):
        path = folder / f"{split}-{number:05}-of-{len(shards):05}.parquet"
        with pq.ParquetWriter(str(path), schema, compression="zstd") as writer:
            for rows in _chunks(shard, ROW_GROUP_BYTES):
                columns = {
                    "text": [d.text for d in rows],
                    "source": [d.name for d in rows],
                    "text_chars": [len(d.text) for d in rows],
                }
                writer.write_table(pa.table(columns, schema=schema))


_FEATURES = {
    "info": {
        "features": {
            "text": {"dtype": "string", "_type": "Value"},
            "source": {"dtype": "string", "_type": "Value"},
            "text_chars": {"dtype": "int64", "_type": "Value"},
        }
    }
}


def _chunks(documents: Sequence[RawDocument], limit: int) -> list[list[RawDocument]]:
    """Consecutive documents in lists of at most `limit` characters, at least one in each."""
    chunks: list[list[RawDocument]] = []
    filled = 0
    for document in documents:
        if not chunks or filled + len(document.text) > limit:
            chunks.append([])
            filled = 0
        chunks[-1].append(document)
        filled += len(document.text)
    return chunks
