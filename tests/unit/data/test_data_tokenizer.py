"""The tokenizer: round trips, no smuggled specials, determinism."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from elastic_trainer.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe
from elastic_trainer.errors import DataError


def test_any_text_reads_back(tokenizer: Tokenizer) -> None:
    for text in ("", " leading", "naïve 日本 🎻\r\n\ttab\0", "a" * 1000):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        (batch,) = tokenizer.encode_batch([text])
        assert batch.dtype == np.int32 and batch.tolist() == ids
    assert 290 < tokenizer.vocab_size <= 300


def test_text_cannot_spell_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eos_id == 0 and 0 not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([0]) == ""


def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_json())
    for path in (file, tmp_path):
        loaded = load_tokenizer(str(path))
        assert loaded.encode("the pipeline") == tokenizer.encode("the pipeline")
        assert (loaded.eos_id, loaded.vocab_size) == (0, tokenizer.vocab_size)


def test_training_is_deterministic(texts: Sequence[str]) -> None:
    assert train_bpe(texts, 280).to_json() == train_bpe(texts, 280).to_json()


def test_small_vocabulary_refused() -> None:
    with pytest.raises(DataError, match="at least 257.*256 asked for"):
        train_bpe(["x"], 256)
