"""Building a dataset of pictures, sound and text: read, measured, split by group, written."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from elastic_trainer.data.media import captions, digits, own_files, speech
from elastic_trainer.data.media.raw import Problems, RawSample, RawSource
from elastic_trainer.data.media.rows import Layout, Row, SplitWriter, layout_of, read_row
from elastic_trainer.data.publish import DatasetInfo, publish, reusable
from elastic_trainer.data.split import held_out_names
from elastic_trainer.data.tokenizer import Tokenizer, train_bpe
from elastic_trainer.errors import DataError

# Each builder takes where to note problems and its own keyword arguments.
BUILDERS: dict[str, Callable[..., RawSource]] = {
    "captions": captions.build,
    "speech": speech.build,
    "digits": digits.build,
    "from": own_files.build,
}
TOKENIZER_SAMPLE_CHARS = 8_000_000
_FORMAT = 1


def build_media(
    kind: str,
    folder: Path,
    *,
    vocab_size: int,
    eval_fraction: float,
    seed: int,
    overwrite: bool,
    on_error: str = "raise",
    **source: Any,
) -> DatasetInfo:
    """Build a dataset, or return the one that the same call built before.

    Args:
        kind: a key of `BUILDERS`.
        folder: where it goes.
        vocab_size: entries of the tokenizer's vocabulary.
        eval_fraction: share of the groups (pictures) held out, chosen by (seed, group).
        seed: of the split.
        overwrite: replace a dataset in `folder` that was built otherwise.
        on_error: raise, or skip samples that cannot be read and count them.
        source: arguments of the builder.
    """
    problems = Problems(on_error)
    raw = BUILDERS[kind](problems, **source)
    arguments = {
        "format": _FORMAT,
        "kind": kind,
        "vocab_size": vocab_size,
        "eval_fraction": eval_fraction,
        "seed": seed,
        "on_error": on_error,
        "source": [asdict(origin) for origin in raw.sources],
    }
    if existing := reusable(folder, arguments, overwrite):
        return existing
    samples = _with_own_ids(_storable(raw.samples, problems))
    held_out = held_out_names(
        {sample.group for sample in samples}, eval_fraction=eval_fraction, seed=seed
    )
    layout = layout_of(samples, raw.extra)

    def write(building: Path) -> DatasetInfo:
        tally = _Tally()
        digests = _write(building / "data", samples, held_out, layout, problems, tally)
        tokenizer = train_bpe(tally.texts(), vocab_size)
        (building / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        return _describe(kind, folder, arguments, raw, problems, tally, tokenizer, digests)

    return publish(folder, write)


class _Tally:
    """Counts while rows are written, and a sample of the texts to train a tokenizer on."""

    def __init__(self) -> None:
        self.rows = {"train": 0, "eval": 0}
        self.rows_with = {"image": 0, "audio": 0, "text": 0}
        self.num_chars = 0
        self.audio_s = 0.0
        self._texts: list[str] = []
        self._chars = self._seen = 0
        self._stride = 1

    def add(self, split: str, row: Row) -> None:
        text = row.columns["text"]
        self.rows[split] += 1
        self.num_chars += len(text)
        self.audio_s += row.audio_s
        self.rows_with["text"] += bool(text)
        for name, num in row.num_media.items():
            self.rows_with[name] += num > 0
        if split == "train":
            self._keep(text)

    def texts(self) -> list[str]:
        return self._texts

    def _keep(self, text: str) -> None:
        """Every n-th text, n doubled whenever too much has been kept."""
        if self._seen % self._stride == 0:
            self._texts.append(text)
            self._chars += len(text)
        self._seen += 1
        if self._chars > 2 * TOKENIZER_SAMPLE_CHARS and len(self._texts) > 1:
            self._texts = self._texts[::2]
            self._chars = sum(map(len, self._texts))
            self._stride *= 2


def _write(
    folder: Path,
    samples: Sequence[RawSample],
    held_out: set[str],
    layout: Layout,
    problems: Problems,
    tally: _Tally,
) -> list[str]:
    """Write both splits in one pass, so that archives are read from front to back."""
    writers = {split: SplitWriter(folder, split, layout) for split in ("train", "eval")}
    try:
        for sample in samples:
            split = "eval" if sample.group in held_out else "train"
            try:
                row = read_row(sample, layout)
            except DataError as error:
                problems.note(error)
                continue
            writers[split].add(row)
            tally.add(split, row)
        for split, num_rows in tally.rows.items():
            if not num_rows:
                raise DataError(
                    f"no row is left for the {split} split: {problems.num} of {len(samples)} "
                    f"samples cannot be read; the first: {next(iter(problems.first), '')}",
                    "Repair the files, or change --eval-fraction",
                )
        return [writer.close() for writer in writers.values()]
    finally:
        for writer in writers.values():
            writer.abandon()


def _describe(
    kind: str,
    folder: Path,
    arguments: dict[str, Any],
    raw: RawSource,
    problems: Problems,
    tally: _Tally,
    tokenizer: Tokenizer,
    digests: Sequence[str],
) -> DatasetInfo:
    assert tokenizer.eos_id is not None  # train_bpe always defines it
    first, *more = raw.sources
    return DatasetInfo(
        name=kind,
        path=str(folder),
        num_rows=tally.rows["train"],
        num_eval_rows=tally.rows["eval"],
        num_chars=tally.num_chars,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        digest=sha256("/".join(digests).encode()).hexdigest(),
        source=first,
        more_sources=more,
        arguments=arguments,
        rows_with=tally.rows_with,
        audio_s=round(tally.audio_s, 3),
        num_skipped=problems.num,
        skipped=problems.first,
    )


def _storable(samples: Iterable[RawSample], problems: Problems) -> Iterator[RawSample]:
    """Those whose texts and names are Unicode: JSON may hold halves of characters, and names of
    files may be any bytes.
    """
    for sample in samples:
        paths = [file.path for file in (*sample.images, *sample.audio)]
        for text in (sample.id, sample.group, sample.text, *paths):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                shown = ascii(text[max(0, error.start - 20) : error.end])
                name = sample.id.encode(errors="backslashreplace").decode()
                problem = DataError(
                    f"sample {name} has a text or the name of a file that is not Unicode: {shown}",
                    "Repair or rename it",
                )
                problems.note(problem)
                break
        else:
            yield sample


def _with_own_ids(samples: Iterable[RawSample]) -> list[RawSample]:
    """All of them, none of which is called as another."""
    found: dict[str, RawSample] = {}
    for sample in samples:
        if sample.id in found:
            raise DataError(
                f"two samples are called {sample.id}",
                "Give one of the files or ids another name: each row needs its own",
            )
        found[sample.id] = sample
    return list(found.values())
