"""Streams: each token or row once per epoch, whatever the batch size and the resume point."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_trainer.config import Config
from elastic_trainer.data import blocks, documents
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.tokenizer import Tokenizer
from elastic_trainer.types import BatchInfo, Cursor

Batch = tuple[BatchInfo, list[dict[str, Any]]]
MakeConfig = Callable[..., Config]
Write = Callable[..., Path]
FUNCTION_FIXTURES = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def epoch_of(stream: BatchStream, epoch: int = 0) -> list[Batch]:
    """Batches up to the end of this epoch."""
    taken = []
    while stream.cursor.epoch <= epoch:
        taken.append(next(stream))
    return taken


def pieces(batches: list[Batch]) -> Iterator[tuple[int, int]]:
    """(row, token) pairs that the sample ids name."""
    for info, _ in batches:
        for sample in (i for m in info.microbatches for i in m.sample_ids):
            for piece in sample.split("+"):
                row, span = piece.split(":")
                start, stop = map(int, span.split("-"))
                yield from ((int(row), token) for token in range(start, stop))


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    for (info, fields), (expected_info, expected) in zip(ours, theirs, strict=True):
        assert info == expected_info
        for microbatch, other in zip(fields, expected, strict=True):
            assert microbatch.keys() == other.keys()
            for name in microbatch:
                assert microbatch[name].dtype == other[name].dtype
                np.testing.assert_array_equal(microbatch[name], other[name])


@st.composite
def token_streams(draw: st.DrawFn) -> dict[str, Any]:
    rows = st.lists(st.lists(st.integers(0, 30), max_size=20), min_size=1, max_size=12)
    return {
        "rows": draw(rows.filter(any)),
        "length": draw(st.integers(1, 9)),
        "batch_size": draw(st.integers(1, 7)),
        "microbatch_size": draw(st.integers(1, 4)),
        "block_tokens": draw(st.sampled_from([1, 20, 1 << 17])),
        "cache_bytes": draw(st.sampled_from([1, 200, 1 << 20])),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


@FUNCTION_FIXTURES
@given(case=token_streams(), data=st.data())
def test_each_token_once_per_epoch_and_any_resume_point(
    case: dict[str, Any],
    data: st.DataObject,
    tmp_path: Path,
    write: Write,
    config: MakeConfig,
) -> None:
    path = write(tmp_path / "tokens.parquet", {"tokens": _int_lists(case["rows"])})
    settings_ = config(
        path,
        format="tokens",
        sequence_length=case["length"],
        microbatch_size=case["microbatch_size"],
        shuffle=case["shuffle"],
        seed=case["seed"],
        args={"vocab_size": 31},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_TOKENS", case["block_tokens"])
        patch.setattr(documents, "CACHE_BYTES", case["cache_bytes"])
        stream = BatchStream(settings_, "train", case["batch_size"])
        first = epoch_of(stream)
        second = epoch_of(stream, 1)
        expected = Counter(
            (row, token) for row, ids in enumerate(case["rows"]) for token in range(len(ids))
        )
        for epoch in (first, second):
            assert Counter(pieces(epoch)) == expected
            labels = np.concatenate([m["labels"].ravel() for _, f in epoch for m in f])
            tokens = Counter(t for ids in case["rows"] for t in ids)
            assert Counter(labels[labels != -100].tolist()) == tokens
        everything = first + second
        _check_shapes(everything, case, len(first))
        start = data.draw(st.integers(0, len(everything) - 1))
        cursor = everything[start - 1][0].end if start else Cursor()
        resumed = BatchStream(
            settings_, "train", case["batch_size"], cursor, first_update=start + 1
        )
        assert_same(list(itertools.islice(resumed, len(everything) - start)), everything[start:])
        other = BatchStream(settings_, "train", data.draw(st.integers(1, 7)), cursor)
        assert Counter(pieces(epoch_of(other, 1))) == Counter(pieces(everything[start:]))


def _int_lists(rows: list[list[int]]) -> Any:
    return pa.array(rows, type=pa.list_(pa.int32()))


def _check_shapes(batches: list[Batch], case: dict[str, Any], per_epoch: int) -> None:
    for number, (info, fields) in enumerate(batches):
        is_last = (number + 1) % per_epoch == 0
        assert info.update == number + 1
        assert info.num_samples == case["batch_size"] or is_last
        sizes = [m.num_samples for m in info.microbatches]
        assert all(size == case["microbatch_size"] for size in sizes[:-1])
        for microbatch, arrays in zip(info.microbatches, fields, strict=True):
            shape = (microbatch.num_samples, case["length"])
            assert arrays["input_ids"].shape == arrays["labels"].shape == shape
            assert arrays["input_ids"].dtype == arrays["labels"].dtype == np.int64
            assert microbatch.num_tokens == arrays["labels"].size
            assert microbatch.num_valid == np.count_nonzero(arrays["labels"] != -100)
            assert len(microbatch.sample_ids) == microbatch.num_samples
        valid = np.concatenate([m["labels"] for m in fields]) != -100
        assert valid[:-1].all() and (valid.all() or is_last), "only an epoch's last is short"


def test_text_reads_back(
    text_dataset: Path, config: MakeConfig, tokenizer: Tokenizer, texts: list[str]
) -> None:
    stream = BatchStream(config(text_dataset, shuffle=False), "train", 3)
    labels = np.concatenate([m["labels"].ravel() for _, f in epoch_of(stream) for m in f])
    eos = tokenizer.eos_id
    assert eos is not None
    read_back: list[str] = []
    current: list[int] = []
    for token in labels[labels != -100].tolist():
        if token == eos:
            read_back.append(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    assert read_back == texts and not current


def test_orders_differ_between_epochs_and_seeds_but_not_between_runs(
    text_dataset: Path, config: MakeConfig
) -> None:
    def ids(seed: int, epoch: int) -> list[str]:
        stream = BatchStream(config(text_dataset, seed=seed), "train", 4, Cursor(epoch=epoch))
        return [i for b, _ in epoch_of(stream, epoch) for m in b.microbatches for i in m.sample_ids]

    assert ids(0, 0) == ids(0, 0)
    assert ids(0, 0) != ids(0, 1)
    assert ids(0, 0) != ids(1, 0)


def test_blocks_mix_documents(text_dataset: Path, config: MakeConfig) -> None:
    """Consecutive sequences of one document do not stay neighbours."""

    def changes(shuffle: bool) -> int:
        stream = BatchStream(config(text_dataset, shuffle=shuffle), "train", 100)
        (info, _), *_ = epoch_of(stream)
        rows = [i.split(":")[0] for m in info.microbatches for i in m.sample_ids]
        return sum(a != b for a, b in itertools.pairwise(rows))

    assert changes(True) > 2 * changes(False)


def test_held_out_batches_come_in_one_order(text_dataset: Path, config: MakeConfig) -> None:
    first = epoch_of(BatchStream(config(text_dataset, seed=0), "eval", 4))
    again = BatchStream(config(text_dataset, seed=7), "eval", 4, Cursor(epoch=3))
    for (info, fields), (other, expected) in zip(first, epoch_of(again, 3), strict=True):
        assert info.microbatches == other.microbatches
        for ours, theirs in zip(fields, expected, strict=True):
            np.testing.assert_array_equal(ours["labels"], theirs["labels"])
    limited = list(BatchStream(config(text_dataset), "eval", 4, num_epochs=1))
    assert len(limited) == len(first)


def test_synthetic_needs_no_dataset(config: MakeConfig) -> None:
    settings_ = config("nowhere", format="synthetic", args={"vocab_size": 17})
    info = describe(settings_)
    assert (info.vocab_size, info.tokenizer_path, info.fields) == (
        17,
        None,
        ("input_ids", "labels"),
    )
    stream = BatchStream(settings_, "train", 6)
    batches = list(itertools.islice(stream, 4))
    resumed = BatchStream(settings_, "train", 6, batches[1][0].end, first_update=3)
    assert_same(list(itertools.islice(resumed, 2)), batches[2:])
    array = batches[0][1][0]["input_ids"]
    assert array.shape == (2, 8) and 0 <= array.min() and array.max() < 17
    assert (array[:, 1:] == batches[0][1][0]["labels"][:, :-1]).all()
    assert array.tolist() == GOLDEN_SYNTHETIC
    almost = BatchStream(settings_, "eval", 6, Cursor(row=1022))
    assert [b.num_samples for b, _ in itertools.islice(almost, 2)] == [2, 6]


GOLDEN_SYNTHETIC = [[2, 16, 3, 3, 11, 9, 14, 5], [10, 10, 15, 1, 6, 10, 9, 16]]


def test_columns(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    pixels = [[[r, r + 0.5], [0.0, 1.0]] for r in range(7)]
    path = write(
        tmp_path / "train.parquet",
        {
            "image": pa.array(pixels, type=pa.list_(pa.list_(pa.float64(), 2), 2)),
            "length": pa.array(range(7), type=pa.int16()),
            "label": pa.array([0, 1, -100, 3, 4, 5, 6], type=pa.int8()),
            "spare": ["x"] * 7,
        },
    )
    settings_ = config(
        path, format="columns", input_columns=["image", "length"], label_columns=["label"]
    )
    assert describe(settings_).fields == ("image", "length", "label")
    assert describe(settings_).num_eval_rows is None
    batches = epoch_of(BatchStream(settings_, "train", 3))
    assert [b.num_samples for b, _ in batches] == [3, 3, 1]
    assert sum(b.num_valid for b, _ in batches) == 6
    ids = [int(i) for b, _ in batches for m in b.microbatches for i in m.sample_ids]
    assert sorted(ids) == list(range(7)) and ids != list(range(7))
    for info, fields in batches:
        for microbatch, arrays in zip(info.microbatches, fields, strict=True):
            rows = [int(i) for i in microbatch.sample_ids]
            assert arrays["image"].dtype == np.float32
            np.testing.assert_array_equal(arrays["image"], [pixels[r] for r in rows])
            assert arrays["length"].dtype == np.int64 and arrays["length"].tolist() == rows
    resumed = BatchStream(settings_, "train", 3, batches[0][0].end, first_update=2)
    assert_same(epoch_of(resumed), batches[1:])


def test_float_labels_count_samples(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    path = write(tmp_path / "x.parquet", {"x": [1.0, 2.0, 3.0], "y": [0.5, -100.0, 2.0]})
    settings_ = config(path, format="columns", input_columns=["x"], label_columns=["y"])
    info, fields = next(BatchStream(settings_, "train", 3))
    assert info.num_valid == info.num_samples == 3
    assert fields[0]["y"].dtype == np.float32


def test_tokens_are_separated_by_the_id_that_dataset_json_names(
    tmp_path: Path, write: Write, config: MakeConfig
) -> None:
    write(tmp_path / "train-0.parquet", {"tokens": [[1, 2, 3], [4, 5, 9]]})
    (tmp_path / "dataset.json").write_text('{"vocab_size": 10, "eos_id": 9}')
    settings_ = config(tmp_path, format="tokens", sequence_length=4, shuffle=False)
    assert describe(settings_).vocab_size == 10
    _, (fields,) = next(BatchStream(settings_, "train", 2))
    assert fields["labels"].tolist() == [[1, 2, 3, 9], [4, 5, 9, -100]]
    assert fields["input_ids"].tolist() == [[9, 1, 2, 3], [9, 4, 5, 9]]


def test_describe_names_what_is_there(
    text_dataset: Path, config: MakeConfig, tokenizer: Tokenizer
) -> None:
    info = describe(config(text_dataset))
    assert (info.num_rows, info.num_eval_rows) == (8, 4)
    assert (info.vocab_size, info.eos_id) == (tokenizer.vocab_size, 0)
    assert info.tokenizer_path == str(text_dataset / "tokenizer.json")
    same = describe(config(text_dataset))
    assert same.fingerprint == info.fingerprint
    assert describe(config(text_dataset, seed=1)).fingerprint != info.fingerprint
    assert describe(config(text_dataset, sequence_length=9)).fingerprint != info.fingerprint


def test_eval_path_wins(
    text_dataset: Path, tmp_path: Path, write: Write, config: MakeConfig
) -> None:
    held_out = write(tmp_path / "other.parquet", {"text": ["only this"]})
    settings_ = config(text_dataset, eval_path=str(held_out))
    assert describe(settings_).num_eval_rows == 1
    (info, _), *_ = epoch_of(BatchStream(settings_, "eval", 4))
    assert info.num_samples >= 1
