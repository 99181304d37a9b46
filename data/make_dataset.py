"""Building a dataset: documents from a source, split, tokenizer, Parquet shards, and a record.

Those with pictures and sound are built by `data/media/build.py`; their folder is laid out alike.

A dataset is a folder:

    data/train-00000-of-00001.parquet   text, source, text_chars; Hugging Face layout
    data/eval-00000-of-00001.parquet    held-out documents
    tokenizer.json                      byte-level BPE trained on the training documents
    dataset.json                        what it is, where it came from, digests; written last

Building twice with the same arguments gives the same content. The folder appears whole or not at
all: it is built under another name beside its place and renamed.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_trainer.data import gcide, stdlib_text
from elastic_trainer.data.media.build import BUILDERS as MEDIA_BUILDERS
from elastic_trainer.data.media.build import build_media
from elastic_trainer.data.media.raw import Problems
from elastic_trainer.data.publish import DatasetInfo, publish, reusable
from elastic_trainer.data.raw import Provenance, RawDocument
from elastic_trainer.data.split import held_out_names
from elastic_trainer.data.tokenizer import Tokenizer, train_bpe
from elastic_trainer.errors import DataError

Builder = Callable[..., tuple[Provenance, Iterable[RawDocument]]]

# Each builder takes its own keyword arguments and returns the provenance and the documents.
BUILDERS: dict[str, Builder] = {"stdlib-text": stdlib_text.build, "gcide": gcide.build}

KINDS = (*BUILDERS, *MEDIA_BUILDERS)

SHARD_BYTES = 64 << 20
ROW_GROUP_BYTES = 8 << 20
TOKENIZER_SAMPLE_CHARS = 8_000_000
_FORMAT = 1


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
        kind: a key of `BUILDERS` or of the media's.
        out: folder to create.
        vocab_size: entries of the tokenizer's vocabulary.
        eval_fraction: share of documents or pictures held out, chosen by (seed, name).
        seed: of the split.
        overwrite: replace a dataset in `out` that was built otherwise.
        source: arguments of the builder, such as `deb` for gcide.
    """
    if not 0 < eval_fraction < 1:
        raise DataError(f"eval_fraction is {eval_fraction}", "Choose one between 0 and 1")
    folder = Path(out).expanduser().absolute()
    if kind in MEDIA_BUILDERS:
        _check_arguments(kind, MEDIA_BUILDERS[kind], source, more=("on_error",))
        return build_media(
            kind,
            folder,
            vocab_size=vocab_size,
            eval_fraction=eval_fraction,
            seed=seed,
            overwrite=overwrite,
            **source,
        )
    builder = BUILDERS.get(kind)
    if builder is None:
        raise DataError(
            f"there is no dataset called {kind!r}",
            f"Available are {', '.join(KINDS)}",
        )
    _check_arguments(kind, builder, source)
    provenance, documents = builder(**source)
    arguments = {
        "format": _FORMAT,
        "kind": kind,
        "vocab_size": vocab_size,
        "eval_fraction": eval_fraction,
        "seed": seed,
        "source": asdict(provenance),
    }
    existing = reusable(folder, arguments, overwrite)
    if existing is not None:
        return existing
    train, held_out = split_documents(documents, eval_fraction=eval_fraction, seed=seed)
    tokenizer = train_bpe(sample_texts([d.text for d in train]), vocab_size)
    info = _describe(folder, provenance, arguments, train, held_out, tokenizer)

    def write(building: Path) -> DatasetInfo:
        write_shards(building / "data", "train", train)
        write_shards(building / "data", "eval", held_out)
        (building / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        return info

    return publish(folder, write)


def _check_arguments(
    kind: str,
    builder: Callable[..., Any],
    given: Mapping[str, Any],
    more: Sequence[str] = (),
) -> None:
    """Refuse arguments that a builder does not have, naming those that it has."""
    parameters = inspect.signature(builder).parameters.values()
    known = [p.name for p in parameters if p.annotation is not Problems] + list(more)
    for name in given:
        if name not in known:
            raise DataError(
                f"make-dataset {kind} has no argument {name!r}", f"It has {', '.join(known)}"
            )


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
    ordered = sorted(documents, key=lambda d: d.name)
    names = held_out_names([d.name for d in ordered], eval_fraction=eval_fraction, seed=seed)
    return (
        [d for d in ordered if d.name not in names],
        [d for d in ordered if d.name in names],
    )


def sample_texts(texts: Sequence[str], limit: int = TOKENIZER_SAMPLE_CHARS) -> list[str]:
    """Every n-th text, n so large that about `limit` characters remain: enough for merges."""
    step = -(-sum(map(len, texts)) // limit)
    return list(texts[:: max(step, 1)])


def _digest(train: Sequence[RawDocument], held_out: Sequence[RawDocument]) -> str:
    digest = sha256()
    for split, documents in (("train", train), ("eval", held_out)):
        for document in documents:
            for part in (split, document.name, document.text):
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def write_shards(folder: Path, split: str, documents: Sequence[RawDocument]) -> None:
    """Write one split as `SPLIT-00000-of-0000N.parquet`, in small row groups that seek well."""
    shards = _chunks(documents, SHARD_BYTES)
    types: Any = {"text": pa.string(), "source": pa.string(), "text_chars": pa.int64()}
    schema = pa.schema(types, metadata={"huggingface": json.dumps(_FEATURES)})
    for number, shard in enumerate(shards):
        path = folder / f"{split}-{number:05}-of-{len(shards):05}.parquet"
        with pq.ParquetWriter(str(path), schema, compression="zstd") as writer:
            for rows in _chunks(shard, ROW_GROUP_BYTES):
                columns: dict[str, list[Any]] = {
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
