"""Small datasets for the tests of the data package."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_trainer.config import Config, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from elastic_trainer.data.tokenizer import Tokenizer, train_bpe

TEXTS = [
    "The pipeline drains, then the next segment begins.\n" * repeats + f"row {repeats}"
    for repeats in (1, 7, 0, 3, 2, 5, 1, 4)
]


def write_parquet(path: Path, columns: Mapping[str, Any], group_rows: int = 3) -> Path:
    """Write a file of several row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), str(path), row_group_size=group_rows)
    return path


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    return write_parquet


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300)


@pytest.fixture
def text_dataset(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A folder as make-dataset lays it out: two training shards, one held-out shard."""
    folder = tmp_path / "texts"
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", {"text": TEXTS[:5]})
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", {"text": TEXTS[5:]})
    write_parquet(folder / "data" / "eval-00000-of-00001.parquet", {"text": TEXTS[:4]})
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return folder


def make_config(
    path: Path | str,
    *,
    microbatch_size: int = 2,
    seed: int = 0,
    args: Mapping[str, Any] | None = None,
    **data: Any,
) -> Config:
    """A configuration that reads `path`."""
    data.setdefault("sequence_length", 8)
    return Config(
        data=DataConfig(path=str(path), **data),
        model=ModelConfig(args=dict(args or {})),
        pipeline=PipelineConfig(microbatch_size=microbatch_size),
        train=TrainConfig(seed=seed),
    )


@pytest.fixture(scope="session")
def config() -> Callable[..., Config]:
    return make_config


@pytest.fixture(scope="session")
def texts() -> Sequence[str]:
    return TEXTS
