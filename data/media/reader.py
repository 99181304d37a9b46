"""Samples of pictures, sound and text from Parquet: sizes first, decoding when a batch is known.

Which samples a batch holds, and how it is packed, follows from the order of rows and from the size
columns alone: nothing is decoded for it. A sample that cannot be read keeps its place in its
microbatch and contributes nothing, so that one damaged file moves no other sample.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.config import Config, DataConfig
from elastic_trainer.data.media.audio import AudioLimits, audio_size, num_frames
from elastic_trainer.data.media.collate import Decoded, collate, opened_text_tokens
from elastic_trainer.data.media.decoders import Decoders, shared
from elastic_trainer.data.media.decoding import File, Limits, Made, Picture
from elastic_trainer.data.media.images import ImageLimits, image_size, patch_rows_columns
from elastic_trainer.data.media.schema import (
    COLUMNS,
    MODALITIES,
    SIZE_COLUMNS,
    as_list,
    check_names,
    check_types,
    sizes_in,
)
from elastic_trainer.data.samples import Fields, RowOrder, Sample
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.data.tokenizer import Tokenizer
from elastic_trainer.errors import DataError, PackingError
from elastic_trainer.planner.packing import TOO_LONG_HINT
from elastic_trainer.planner.sizes import ItemSize
from elastic_trainer.types import Cursor, MicrobatchInfo

FIELDS_OF = {
    "image": frozenset({"patches", "patch_grid", "image_lengths"}),
    "audio": frozenset({"frames", "clip_lengths"}),
}
_TEXTS = 4096  # whose tokens are kept: each is wanted for its size first, and then for itself
_CHUNK = 16  # samples that a decoder gets at a time: it stands still while one is handed over
_CHUNKS_AHEAD = 2  # per decoder, under way or waiting to be collected
_PATIENCE = 1 / 4  # of the stall limit, with which a sample is decoded: it may be tried twice
_LEAST_PATIENCE_S = 5.0  # the machine may be busy


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample as it lies on storage."""

    files: Mapping[str, Sequence[File]]
    text: str | None
    size: ItemSize

    @property
    def needs_decoding(self) -> bool:
        return bool(self.text and self.text.strip() and any(self.files.values()))


class MediaSamples:
    """Rows of pictures, sound and text, each of both from none to many.

    Args:
        source: the chosen columns of the dataset.
        order: of its rows.
        tokenizer: of the text; it has an id that ends a text.
        config: limits of sizes, names of columns, and what to do with what cannot be read.
    """

    def __init__(
        self, source: ParquetSource, order: RowOrder, tokenizer: Tokenizer, config: Config
    ) -> None:
        data = config.data
        self._names = {name: data.columns.get(name, name) for name in COLUMNS}
        self._order = order
        self._encode = lru_cache(_TEXTS)(tokenizer.encode)
        self._eos_id = eos_of(tokenizer)
        self._skips = data.on_error == "skip"
        self._max_tokens = data.max_tokens_per_microbatch
        self._limits = self._image, self._audio = limits_of(data)
        self._patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * config.elastic.stall_limit_s)
        self._kinds = [k for k in MODALITIES if self._names[k] in source.columns]
        _check_columns(source, self._names, self._kinds, data.columns)
        heavy = [self._names[kind] for kind in self._kinds]
        light = [column for column in source.columns if column not in heavy]
        self._heavy = source.part(heavy, nullable=heavy)
        self._light = source.part(light, nullable=light)
        self._workers = data.media_workers
        self._cache_bytes = data.media_cache_mb << 20

    def next(self, cursor: Cursor) -> Sample:
        """The sample at the cursor, undecoded: its id and its sizes."""
        self._order.check(cursor)
        row = self._order.row(cursor.epoch, cursor.row)
        size = self._size(row)
        if error := self._too_long(row, size):
            if not self._skips:
                raise error
            size = ItemSize()  # nothing will come of it
        following = cursor.row + 1
        end = Cursor(epoch=cursor.epoch, row=following)
        if following == self._order.num_rows:
            end = Cursor(epoch=cursor.epoch + 1)
        return Sample({}, str(row), size.num_tokens, size.text_tokens, end, size)

    def join(
        self,
        samples: Sequence[Sample],
        microbatches: Sequence[Sequence[int]],
        decoded: Iterator[Decoded | DataError],
        wanted: Collection[str] | None = None,
    ) -> tuple[list[MicrobatchInfo], list[Fields]]:
        """Facts and fields of each microbatch.

        Args:
            samples: of a batch, without fields.
            microbatches: places of samples.
            decoded: what `decode` makes of them, one after the other.
            wanted: the fields to make, None: all. Facts are the same whichever these are.

        Raises:
            DataError: one cannot be read, or under `data.on_error: skip` none at all.
        """
        waiting = {place: next(decoded) for place in range(len(samples))}
        infos, fields = [], []
        for places in microbatches:
            # What is put together need not be held twice.
            results = [waiting.pop(place) for place in places]
            made = self.collate([result for result in results if isinstance(result, Decoded)])
            infos.append(_describe([samples[place] for place in places], results, made))
            fields.append({k: v for k, v in made.items() if wanted is None or k in wanted})
        if samples and not any(info.num_samples for info in infos):
            raise DataError(
                f"none of the {len(samples)} samples of a batch can be read",
                "Set data.on_error=raise to see why",
            )
        return infos, fields

    def collate(self, samples: Sequence[Decoded]) -> Fields:
        """The fields of a microbatch of these samples."""
        return collate(
            samples,
            eos_id=self._eos_id,
            patch_size=self._image.patch_size,
            mel_bins=self._audio.mel_bins,
        )

    def _kinds_for(self, wanted: Collection[str] | None) -> list[str]:
        """What must be decoded for these fields."""
        # Whether a sample is skipped is known only once all of it is decoded.
        if wanted is None or self._skips:
            return self._kinds
        return [kind for kind in self._kinds if not FIELDS_OF[kind].isdisjoint(wanted)]

    def decode(
        self, samples: Iterable[Sample], wanted: Collection[str] | None = None
    ) -> Iterator[Decoded | DataError]:
        """What the decoders make of the samples, in order, a few ahead of the reader.

        Args:
            samples: without fields; taken one by one.
            wanted: fields that will be made. Media of other ones have only their sizes.
        """
        kinds, rest = self._kinds_for(wanted), iter(samples)
        waiting: deque[tuple[list[Sample], Future[list[Decoded | DataError]]]] = deque()
        failure: DataError | None = None
        try:
            while failure is None and (chunk := list(islice(rest, _CHUNK))):
                # Storage is read by this thread alone; only the decoding is spread.
                rows, failure = self._rows(chunk, kinds)
                decoders = shared(self._workers, self._cache_bytes)
                waiting.append((chunk, decoders.submit(self._decode_all, rows, decoders)))
                if len(waiting) >= _CHUNKS_AHEAD * self._workers:
                    yield from self._collect(*waiting.popleft())
            while waiting:
                yield from self._collect(*waiting.popleft())
        finally:
            for _, decoding in waiting:  # nobody wants it any more, and others use the decoders
                decoding.cancel()
        if failure is not None:  # in its turn
            raise failure

    def _rows(
        self, samples: Sequence[Sample], kinds: Sequence[str]
    ) -> tuple[list[_Row | PackingError], DataError | None]:
        """The rows of these samples, or that they are too long, up to one that storage does not
        give."""
        rows: list[_Row | PackingError] = []
        try:
            for sample in samples:
                assert sample.size is not None
                if sample.size.num_tokens:
                    rows.append(self._row(sample, kinds))
                    continue
                row = int(sample.id)  # `next` found it too long, and it is to be told how long
                too_long = self._too_long(row, self._size(row))
                assert too_long is not None
                rows.append(too_long)
        except DataError as error:
            return rows, error
        return rows, None

    def _collect(
        self, samples: Sequence[Sample], decoding: Future[list[Decoded | DataError]]
    ) -> Iterator[Decoded | DataError]:
        for sample, result in zip(samples, decoding.result(), strict=False):
            if not isinstance(result, DataError) or isinstance(result, PackingError):
                yield result  # the latter says where, and is none to be raised
                continue
            told = DataError(f"{self._where(int(sample.id))}: {result.what}", result.hint)
            if not self._skips:
                raise told from result
            yield told

    def _decode_all(
        self, rows: Sequence[_Row | PackingError], decoders: Decoders
    ) -> list[Decoded | DataError]:
        files = [row.files for row in rows if isinstance(row, _Row) and row.needs_decoding]
        made = iter(decoders.decode(files, self._limits, self._patience_s))
        results: list[Decoded | DataError] = []
        for row in rows:
            if not isinstance(row, _Row):
                results.append(row)
                continue
            result = next(made) if row.needs_decoding else ([], [])
            results.append(self._finish(row, result))
        return results

    def _finish(self, row: _Row, made: Made | DataError) -> Decoded | DataError:
        """The sample, from what its files have become."""
        if row.text is None or not row.text.strip():
            return DataError("the text is missing", "Remove it, or set data.on_error=skip")
        if isinstance(made, DataError):
            return made
        pictures, clips = made
        decoded = Decoded(
            pictures if "image" in row.files else self._unseen(row.size),
            clips if "audio" in row.files else self._unheard(row.size),
            self._encode(row.text),
        )
        return _wrong_sizes(decoded, row.size) or decoded

    def _too_long(self, row: int, size: ItemSize) -> PackingError | None:
        """What is wrong with a sample that fits into no microbatch."""
        if not 0 < self._max_tokens < size.num_tokens:
            return None
        what = f"has {size.num_tokens} tokens, more than the {self._max_tokens} of a microbatch"
        return PackingError(f"{self._where(row)} {what}", TOO_LONG_HINT)

    def _unseen(self, size: ItemSize) -> list[Picture]:
        """Pictures that nobody will look at."""
        patch = np.zeros((1, 3 * self._image.patch_size**2), np.uint8)
        place = np.zeros((1, 2), np.int64)
        return [
            (np.broadcast_to(patch, (n, patch.size)), np.broadcast_to(place, (n, 2)))
            for n in size.image_patches
        ]

    def _unheard(self, size: ItemSize) -> list[NDArray[np.float32]]:
        """Clips that nobody will hear."""
        frame = np.zeros((1, self._audio.mel_bins), np.float32)
        return [np.broadcast_to(frame, (n, frame.size)) for n in size.audio_frames]

    def _row(self, sample: Sample, kinds: Sequence[str]) -> _Row:
        row = int(sample.id)
        assert sample.size is not None
        files = {kind: self._files(row, kind) for kind in kinds}
        return _Row(files, self._light_value(row, "text"), sample.size)

    def _files(self, row: int, kind: str) -> list[File]:
        value = self._heavy.value(row, self._names[kind]).as_py()
        files = [
            File(item["bytes"], item.get("path")) if isinstance(item, dict) else File(item)
            for item in as_list(value)
        ]
        return [file for file in files if file.data is not None or file.path]

    def _size(self, row: int) -> ItemSize:
        text = self._light_value(row, "text") or ""
        tokens = opened_text_tokens(len(self._encode(text)))
        patches = []
        for width, height in self._sizes(row, "image", image_size):
            rows, columns = patch_rows_columns(width, height, self._image)
            patches.append(rows * columns)
        frames = [num_frames(n, r, self._audio) for n, r in self._sizes(row, "audio", audio_size)]
        return ItemSize(tuple(patches), tuple(frames), tokens)

    def _sizes(
        self, row: int, kind: str, look: Callable[[bytes], tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Two numbers of each picture or clip: from the size columns, else from its head."""
        if kind not in self._kinds:
            return []
        names = [self._names[name] for name in SIZE_COLUMNS[kind]]
        if all(name in self._light.columns for name in names):
            return sizes_in(*(self._light.plain(row, name) for name in names))
        found = []
        for file in self._files(row, kind):
            try:
                found.append(look(file.read()))
            except DataError:  # told when it is decoded
                found.append((1, 1))
        return found

    def _light_value(self, row: int, name: str) -> Any:
        column = self._names[name]
        if column not in self._light.columns:
            return None
        return self._light.plain(row, column)

    def _where(self, row: int) -> str:
        named = self._light_value(row, "id")
        return self._light.where(row) + (f" ({named})" if named else "")


def _wrong_sizes(decoded: Decoded, expected: ItemSize) -> DataError | None:
    """Loaders that do not decode a sample know it by its recorded sizes, so these must be right."""
    pairs = {
        "pictures have %s patches": (
            [len(patches) for patches, _ in decoded.pictures],
            [*expected.image_patches],
        ),
        "clips have %s frames": ([len(clip) for clip in decoded.clips], [*expected.audio_frames]),
    }
    for what, (found, told) in pairs.items():
        if found != told:
            return DataError(
                f"its {what % found}, but by their recorded sizes {told}",
                "Correct the columns of sizes, or leave them out; or set data.on_error=skip",
            )
    return None


def limits_of(data: DataConfig) -> Limits:
    """The limits of sizes that a configuration sets."""
    return (
        ImageLimits(
            patch_size=data.patch_size,
            max_patches=data.max_patches,
            max_pixels=data.max_image_pixels,
        ),
        AudioLimits(
            sample_rate=data.sample_rate, mel_bins=data.mel_bins, max_seconds=data.max_audio_s
        ),
    )


def eos_of(tokenizer: Tokenizer) -> int:
    """The id that opens and ends a text."""
    if tokenizer.eos_id is None:
        raise DataError(
            "the tokenizer has no token that ends a text, such as <|endoftext|>",
            "Add one, or set data.tokenizer to another",
        )
    return tokenizer.eos_id


def _describe(
    samples: Sequence[Sample], results: Sequence[Decoded | DataError], fields: Fields
) -> MicrobatchInfo:
    good = [isinstance(result, Decoded) for result in results]
    return MicrobatchInfo(
        num_samples=sum(good),
        num_tokens=fields["input_ids"].size,
        num_valid=int((fields["labels"] >= 0).sum()),
        sample_ids=tuple(s.id for s, is_good in zip(samples, good, strict=True) if is_good),
        skipped=tuple(
            (sample.id, result.what)
            for sample, result in zip(samples, results, strict=True)
            if isinstance(result, DataError)
        ),
    )


def _check_columns(
    source: ParquetSource, names: Mapping[str, str], kinds: Sequence[str], given: Mapping[str, str]
) -> None:
    check_names(given, "data.columns")
    for name, column in given.items():
        if column not in source.columns:
            raise DataError(
                f"{source.files[0]} has no column {column!r}, which data.columns.{name} names",
                f"Its columns are {', '.join(source.all_columns)}",
            )
    if not kinds:
        raise DataError(
            f"{source.files[0]} has neither pictures nor sound: no column "
            f"{names['image']!r} or {names['audio']!r} among {', '.join(source.all_columns)}",
            "Name them, such as data.columns.image=img",
        )
    check_types(source.files[0], source.types, names)
