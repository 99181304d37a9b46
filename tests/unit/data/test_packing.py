"""Packing is a fold that uses each token once and that can start anywhere."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.data import documents as documents_module
from elastic_trainer.data.documents import PackedSamples
from elastic_trainer.data.packing import IGNORED_LABEL, Packed, Tokens, pack_next
from elastic_trainer.data.samples import RowOrder
from elastic_trainer.types import Cursor

SEPARATOR = 99
documents = st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=8).filter(any)


def pack_epoch(rows: list[list[int]], length: int, cursor: Cursor) -> list[Packed]:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    packed = []
    while cursor.epoch == 0:
        packed.append(
            pack_next(cursor, len(rows), arrays.__getitem__, length=length, separator=SEPARATOR)
        )
        cursor = packed[-1].end
    return packed


@settings(deadline=None)
@given(documents, st.integers(1, 9))
def test_each_token_is_a_label_once_behind_the_token_before_it(
    rows: list[list[int]], length: int
) -> None:
    packed = pack_epoch(rows, length, Cursor())
    labels = np.concatenate([p.labels for p in packed])
    inputs = np.concatenate([p.input_ids for p in packed])
    tokens = [token for row in rows for token in row]
    before = [token for row in rows for token in [SEPARATOR, *row[:-1]] if row]
    assert labels[: len(tokens)].tolist() == tokens
    assert inputs[: len(tokens)].tolist() == before
    assert (labels[len(tokens) :] == IGNORED_LABEL).all()
    assert (inputs[len(tokens) :] == SEPARATOR).all()
    assert len(labels) - len(tokens) < length
    assert sum(p.num_valid for p in packed) == len(tokens)
    used = [(p.position, t) for seq in packed for p in seq.pieces for t in range(p.start, p.stop)]
    assert used == [(r, t) for r, row in enumerate(rows) for t in range(len(row))]


@settings(deadline=None)
@given(documents, st.integers(1, 9))
def test_the_rest_of_an_epoch_follows_from_any_cursor(rows: list[list[int]], length: int) -> None:
    packed = pack_epoch(rows, length, Cursor())
    for index, sequence in enumerate(packed[:-1]):
        resumed = pack_epoch(rows, length, sequence.end)
        assert [p.end for p in resumed] == [p.end for p in packed[index + 1 :]]
        for ours, theirs in zip(resumed, packed[index + 1 :], strict=True):
            assert (ours.input_ids == theirs.input_ids).all()
            assert (ours.labels == theirs.labels).all()


def test_an_epoch_ends_at_its_last_token_even_before_empty_rows() -> None:
    packed = pack_epoch([[1, 2], [], []], 2, Cursor())
    assert len(packed) == 1
    assert packed[0].end == Cursor(epoch=1)


def test_nothing_to_pack() -> None:
    sequence = pack_next(
        Cursor(), 1, lambda _: np.array([], dtype=np.int32), length=4, separator=SEPARATOR
    )
    assert sequence.pieces == () and sequence.num_valid == 0


def test_documents_stay_in_memory_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []

    class FourTokensEach:
        def load(self, rows: Iterator[int]) -> dict[int, Tokens]:
            loaded.append(next(rows))
            return {loaded[-1]: np.arange(4, dtype=np.int32)}

    class AsTheyLie:
        num_rows = 6

        def check(self, cursor: Cursor) -> None:
            pass

        def row(self, epoch: int, position: int) -> int:
            return position

    monkeypatch.setattr(documents_module, "CACHE_BYTES", 3 * 16)
    order = cast(RowOrder, AsTheyLie())
    samples = PackedSamples(FourTokensEach(), order, length=4, separator=SEPARATOR)
    for row in (0, 1, 2, 3, 4):
        assert samples.next(Cursor(row=row)).id == f"{row}:0-4"
    assert loaded == [0, 1, 2, 3, 4, 5], "each sequence looks at the row behind it"
    samples.next(Cursor(row=3))
    samples.next(Cursor(row=4))
    assert loaded == [0, 1, 2, 3, 4, 5], "three documents fit"
    samples.next(Cursor(row=0))
    assert loaded == [0, 1, 2, 3, 4, 5, 0, 1]
