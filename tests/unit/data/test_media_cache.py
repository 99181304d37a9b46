"""What was decoded is kept: it changes no bit and no error, only what is decoded again."""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.config import Config, DataConfig, PipelineConfig, TrainConfig
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.media import decoders, decoding, made_cache
from elastic_trainer.data.media.audio import AudioLimits
from elastic_trainer.data.media.decoding import File, Files, Made
from elastic_trainer.data.media.images import ImageLimits
from elastic_trainer.data.media.made_cache import ENTRY_BYTES, MadeCache
from elastic_trainer.data.tokenizer import Tokenizer
from elastic_trainer.errors import DataError

LIMITS = (ImageLimits(), AudioLimits())
WAIT_S = 30.0
PLENTY = 64 << 20
NUM_ROWS, NUM_PICTURES, NUM_CLIPS = 40, 7, 3


class Recorder:
    """Decodes, and knows what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Files] = []

    def __call__(self, samples: Sequence[Files]) -> list[Made | DataError]:
        self.asked += samples
        return [decoding.make(files, LIMITS) for files in samples]

    def files(self) -> list[bytes | None]:
        """What it was asked for since the last time."""
        found = [file.data for files in self.asked for kind in files.values() for file in kind]
        self.asked.clear()
        return found


def plain(results: Sequence[Made | DataError]) -> list[Any]:
    """Everything about them that can be compared."""
    return [
        repr(result)
        if isinstance(result, DataError)
        else [
            [(a.dtype, a.shape, a.tobytes()) for a in arrays] for arrays in (*result[0], result[1])
        ]
        for result in results
    ]


def undisturbed(samples: Sequence[Files]) -> list[Any]:
    return plain([decoding.make(files, LIMITS) for files in samples])


def key(number: int, limits: ImageLimits | AudioLimits = LIMITS[1]) -> made_cache.Key:
    return "audio", limits, number


def clip(num_bytes: int) -> Any:
    return np.zeros(num_bytes // 4, np.float32)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=15, max_size=60),
    st.integers(0, 8),
)
def test_what_was_not_wanted_for_longest_goes_first(
    sizes: list[int], steps: list[tuple[int, bool]], most: int
) -> None:
    """Against a list, oldest first; a step puts what a key stands for, or gets it."""
    unit = 4 * ENTRY_BYTES
    cache, model = MadeCache(most * unit), list[int]()
    for number, puts in steps:
        if puts:
            cache.put(key(number), clip(sizes[number] * unit - ENTRY_BYTES))
        else:
            assert (cache.get(key(number)) is not None) == (number in model)
        if number in model or puts and sizes[number] <= most:
            model = [n for n in model if n != number] + [number]
        while sum(sizes[n] for n in model) > most:
            model.pop(0)
        assert cache.num_bytes == sum(sizes[n] for n in model) * unit <= most * unit
    for number in range(6):
        assert (cache.get(key(number)) is None) == (number not in model)
    cache.clear()
    assert cache.num_bytes == 0 and all(cache.get(key(n)) is None for n in range(6))


def test_all_arrays_count(files: Callable[[int], Files]) -> None:
    cache = MadeCache(PLENTY)
    (result,) = cache.through([files(1)], LIMITS, Recorder())
    assert not isinstance(result, DataError)
    (((patches, grid),), (frames,)) = result
    held = patches.nbytes + grid.nbytes + frames.nbytes
    assert cache.num_bytes == held + 2 * ENTRY_BYTES


def test_threads_may_share_it() -> None:
    cache = MadeCache(3 * ENTRY_BYTES)
    ready = threading.Barrier(4)

    def work(seed: int) -> None:
        ready.wait(WAIT_S)
        for number in np.random.default_rng(seed).integers(0, 6, 20_000).tolist():
            cache.put(key(number), clip(0))
            cache.get(key(number))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(before)
    there = [number for number in range(6) if cache.get(key(number)) is not None]
    assert cache.num_bytes == len(there) * ENTRY_BYTES == 3 * ENTRY_BYTES


def test_only_what_is_unknown_is_asked_for(
    picture: Callable[..., bytes], sound: Callable[..., bytes]
) -> None:
    a, b, c = (picture(shade=shade) for shade in (1, 2, 3))
    x, y, z = (sound(num) for num in (500, 600, 700))

    def sample(pictures: list[bytes], clips: list[bytes]) -> Files:
        return {"image": [File(p) for p in pictures], "audio": [File(clip) for clip in clips]}

    cache, decode = MadeCache(PLENTY), Recorder()
    first = [sample([a], [x])]
    assert plain(cache.through(first, LIMITS, decode)) == undisturbed(first)
    assert decode.files() == [a, x]
    mixed = [sample([b, a, c], [y, x, z]), sample([c], []), sample([], [x]), {}, sample([a], [x])]
    assert plain(cache.through(mixed, LIMITS, decode)) == undisturbed(mixed)
    assert decode.files() == [b, c, y, z]
    assert plain(cache.through(mixed, LIMITS, decode)) == undisturbed(mixed)
    assert decode.asked == []


def test_a_file_that_comes_twice_at_once_is_decoded_once(picture: Callable[..., bytes]) -> None:
    a, b = picture(shade=1), picture(shade=2)
    samples: list[Files] = [
        {"image": [File(data) for data in each]} for each in ([a, b, a], [b], [a, b, a])
    ]
    for most in (PLENTY, 1):  # also where nothing is kept any longer
        decode = Recorder()
        found = MadeCache(most).through(samples, LIMITS, decode)
        assert plain(found) == undisturbed(samples)
        assert decode.files() == [a, b]


def test_a_picture_is_no_clip_whatever_is_in_it(sound: Callable[..., bytes]) -> None:
    cache, decode = MadeCache(PLENTY), Recorder()
    for samples in [{"audio": [File(sound())]}], [{"image": [File(sound())]}]:
        assert plain(cache.through(samples, LIMITS, decode)) == undisturbed(samples)
    assert decode.files() == [sound()] * 2


@pytest.mark.parametrize(
    "other",
    [
        (ImageLimits(max_patches=16), LIMITS[1]),
        (ImageLimits(patch_size=8), LIMITS[1]),
        (LIMITS[0], AudioLimits(mel_bins=20)),
        (LIMITS[0], AudioLimits(max_seconds=0.1)),
    ],
)
def test_other_limits_make_something_else(
    files: Callable[[int], Files], other: decoding.Limits
) -> None:
    pool = decoders.Decoders(0, PLENTY)
    pool.decode([files(1)], LIMITS, WAIT_S)
    found = pool.decode([files(1)], other, WAIT_S)
    assert plain(found) == plain([decoding.make(files(1), other)])
    assert plain(found) != undisturbed([files(1)])


def test_what_is_wrong_is_told_each_time(
    picture: Callable[..., bytes], sound: Callable[..., bytes]
) -> None:
    good, other, heard = File(picture(shade=1)), File(picture(shade=2)), File(sound())
    junk, empty, unheld = File(b"junk"), File(b""), File(None, "a.png")
    samples: list[Files] = [
        {"image": [junk]},
        {"image": [junk, empty]},
        {"image": [empty, junk]},  # what is wrong with the first, though another asks for the next
        {"audio": [empty], "image": [good, junk]},  # pictures come before sound
        {"image": [good, other]},  # `good` was lost with the sample before
        {"image": [unheld, good]},
        {"image": [good, unheld], "audio": [heard, junk]},
        {"audio": [heard, junk]},
        {"audio": [heard]},
    ]
    cache, decode = MadeCache(PLENTY), Recorder()
    assert plain(cache.through(samples, LIMITS, decode)) == undisturbed(samples)
    decode.files()
    assert plain(cache.through(samples, LIMITS, decode)) == undisturbed(samples)
    assert sorted({data or b"" for data in decode.files()}) == [b"", b"junk"]
    assert len(cache._held) == 3


def test_what_it_holds_cannot_be_written_to(files: Callable[[int], Files]) -> None:
    for count in (0, 1):
        pool = decoders.Decoders(count, PLENTY)
        for _ in range(2):
            (result,) = pool.decode([files(2)], LIMITS, WAIT_S)
            assert not isinstance(result, DataError)
            arrays: list[Any] = [*result[0][0], *result[1]]
            for array in arrays:
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1
        pool.close()


def test_without_it_nothing_is_looked_at(
    files: Callable[[int], Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_cache, "_digest", None)
    decode = Recorder()
    samples = [files(1), files(1)]
    assert plain(MadeCache(0).through(samples, LIMITS, decode)) == undisturbed(samples)
    assert decode.asked == samples


def test_it_dies_with_the_decoders(files: Callable[[int], Files]) -> None:
    for count in (0, 1):
        pool = decoders.shared(count, PLENTY)
        assert decoders.shared(count, PLENTY) is pool
        pool.decode([files(0)], LIMITS, WAIT_S)
        assert pool.cache.num_bytes
        assert decoders.shared(count, PLENTY // 2).cache.num_bytes == 0
        decoders.close()
        assert pool.cache.num_bytes == 0
        assert decoders.shared(count, PLENTY) is not pool
        decoders.close()


@pytest.mark.parametrize("places", [(1,), (4,), (1, 5), (4, 5)])
def test_only_the_deadly_sample_is_lost_among_known_ones(
    deadly: None, files: Callable[[int], Files], places: tuple[int, ...]
) -> None:
    pool = decoders.Decoders(1, PLENTY)
    known = [files(0), files(2), files(3)]
    pool.decode(known, LIMITS, WAIT_S)
    samples = [files(n) for n in range(7)]
    expected = undisturbed(samples)
    for place in places:  # beside a picture that is known
        samples[place] = {"image": [*files(0)["image"], File(b"segfault")]}
    found = pool.decode(samples, LIMITS, WAIT_S)
    pool.close()
    for place, result in enumerate(found):
        if place in places:
            assert isinstance(result, DataError)
            assert result.what == "the decoder died of signal 11 (SIGSEGV) on it"
        else:
            assert plain([result]) == [expected[place]]


@pytest.fixture
def dataset(
    tmp_path: Path, tokenizer: Tokenizer, picture: Callable[..., bytes], sound: Callable[..., bytes]
) -> Path:
    """Rows that share pictures, large ones so that some do not fit, and clips."""
    rows = [
        {
            "image": [
                picture(700, 500, n % NUM_PICTURES),
                picture(700, 500, n // 3 % NUM_PICTURES),
            ],
            "audio": [sound(3000 + 100 * (n % NUM_CLIPS))] * (n % 2),
            "text": f"row {n}",
            **{"image_width": [700] * 2, "image_height": [500] * 2},
        }
        for n in range(NUM_ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train-0.parquet", row_group_size=7)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    return tmp_path


def stream(path: Path, num_epochs: int = 1, **data: Any) -> list[Any]:
    """All facts of all batches, and what all their bytes amount to."""
    config = Config(
        data=DataConfig(path=str(path), format="media", **data),
        pipeline=PipelineConfig(microbatch_size=2),
        train=TrainConfig(global_batch_size=8),
    )
    return [
        (info, [{name: (a.dtype, a.shape, digest(a)) for name, a in m.items()} for m in made])
        for info, made in BatchStream(config, "train", 8, num_epochs=num_epochs)
    ]


def digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.fixture
def closed() -> Iterator[None]:
    decoders.close()
    yield
    decoders.close()


def test_batches_are_the_same_whatever_is_kept(dataset: Path, closed: None) -> None:
    expected = stream(dataset, 2, media_workers=0, media_cache_mb=0)
    assert len(expected) == 2 * NUM_ROWS // 8
    for workers in (0, 1, 2):
        for megabytes in (1, 128):  # some of the pictures, and all
            found = stream(dataset, 2, media_workers=workers, media_cache_mb=megabytes)
            assert found == expected
            cache = decoders.shared(workers, megabytes << 20).cache
            assert 0 < cache.num_bytes <= megabytes << 20
            assert (len(cache._held) < NUM_PICTURES + NUM_CLIPS) == (megabytes == 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_file_is_decoded_once(
    dataset: Path, closed: None, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    sent: list[File] = []
    ask, make = decoders._Decoder.ask, decoding.make

    def asking(self: Any, samples: Sequence[Files], *rest: Any) -> Any:
        sent.extend(file for files in samples for kind in files.values() for file in kind)
        return ask(self, samples, *rest)

    def making(files: Files, limits: decoding.Limits) -> Any:
        sent.extend(file for kind in files.values() for file in kind)
        return make(files, limits)

    monkeypatch.setattr(decoders._Decoder, "ask", asking)
    monkeypatch.setattr(decoding, "make", making)
    stream(dataset, media_workers=workers)
    assert len(sent) == len(set(sent)) == NUM_PICTURES + NUM_CLIPS
    sent.clear()
    stream(dataset, media_workers=workers)
    assert not sent
    stream(dataset, media_workers=workers, media_cache_mb=0)
    assert len(sent) == 2 * NUM_ROWS + NUM_ROWS // 2
