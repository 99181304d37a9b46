"""What the configuration's data section means: source, tokenizer and reader of each split."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from elastic_trainer.config import DATA_FORMATS, Config
from elastic_trainer.data.blocks import ShuffledBlocks, block_size
from elastic_trainer.data.columns import ColumnSamples
from elastic_trainer.data.documents import Documents, PackedSamples, TextDocuments, TokenDocuments
from elastic_trainer.data.location import REMOTE_TIMEOUT_S, Location
from elastic_trainer.data.media.reader import MediaSamples, eos_of
from elastic_trainer.data.media.schema import COLUMNS
from elastic_trainer.data.samples import RowOrder, SampleReader
from elastic_trainer.data.sources import SPLITS, ParquetSource, open_split
from elastic_trainer.data.synthetic import DEFAULT_VOCAB_SIZE, SyntheticSamples
from elastic_trainer.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from elastic_trainer.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Token ids of a dataset: how many, which one ends a document, and the tokenizer if any."""

    size: int | None
    eos_id: int | None
    tokenizer: Tokenizer | None = None
    tokenizer_path: str | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with the tokenizer and with the id that ends a document."""
        text = self.tokenizer.to_json() if self.tokenizer else ""
        return sha256(f"{self.eos_id}/{text}".encode()).hexdigest()[:16]


class Dataset:
    """The dataset that a configuration names, checked on construction."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._timeout_s = min(REMOTE_TIMEOUT_S, config.elastic.stall_limit_s)
        _check_settings(config)
        self.is_packed = config.data.format in ("text", "tokens")
        self.vocabulary = self._vocabulary()

    def columns(self) -> list[str]:
        """Columns that the format reads."""
        data = self.config.data
        if data.format == "columns":
            return list(dict.fromkeys([*data.input_columns, *data.label_columns]))
        if data.format == "media":
            return [data.columns.get("text", "text")]
        return [data.text_column if data.format == "text" else data.tokens_column]

    def source(self, split: str) -> ParquetSource | None:
        """The opened files of a split, None where there are none."""
        data = self.config.data
        setting = {
            "text": "data.text_column",
            "tokens": "data.tokens_column",
            "media": "data.columns.text",
        }
        is_media = data.format == "media"
        return open_split(
            data.path,
            data.eval_path,
            split,
            self.columns(),
            setting=setting.get(data.format, "data.input_columns and data.label_columns"),
            timeout_s=self._timeout_s,
            optional=[data.columns.get(name, name) for name in COLUMNS] if is_media else (),
        )

    def reader(self, split: str) -> SampleReader:
        """The samples of a split."""
        data, seed = self.config.data, self.config.train.seed
        if data.format == "synthetic":
            size = self.vocabulary.size or DEFAULT_VOCAB_SIZE
            return SyntheticSamples(
                split,
                seed=seed,
                length=data.sequence_length,
                vocab_size=size,
                size_sigma=data.size_sigma,
            )
        source = self.source(split)
        if source is None:
            raise DataError(
                f"the dataset {data.path} has no held-out split",
                "Set data.eval_path, name its files eval-….parquet, or set train.eval_batches=0",
            )
        order = RowOrder(source, split, seed=seed, shuffle=data.shuffle)
        if data.format == "columns":
            return ColumnSamples(source, order, data.input_columns, data.label_columns)
        if data.format == "media":
            assert self.vocabulary.tokenizer is not None  # _vocabulary refused to go without
            return MediaSamples(source, order, self.vocabulary.tokenizer, self.config)
        packed = PackedSamples(
            self._documents(source),
            order,
            length=data.sequence_length,
            separator=self.vocabulary.eos_id or 0,
        )
        return ShuffledBlocks(packed, order.key, size=block_size(data.sequence_length))

    def _documents(self, source: ParquetSource) -> Documents:
        data, vocabulary = self.config.data, self.vocabulary
        if vocabulary.tokenizer is not None and data.format == "text":
            return TextDocuments(source, data.text_column, vocabulary.tokenizer)
        return TokenDocuments(
            source, data.tokens_column, vocab_size=vocabulary.size, eos_id=vocabulary.eos_id
        )

    def _vocabulary(self) -> Vocabulary:
        data = self.config.data
        wanted = self.config.model.args.get("vocab_size")
        if data.format == "synthetic":
            return Vocabulary(size=wanted or DEFAULT_VOCAB_SIZE, eos_id=None)
        if data.format == "columns":
            return Vocabulary(size=wanted, eos_id=None)
        location = Location(data.path, self._timeout_s)
        location.list_parquet()  # a missing dataset is reported as such, not as a lost tokenizer
        path = find_tokenizer(location, data.tokenizer)
        if path is None and data.format in ("text", "media"):
            raise DataError(
                f"there is no tokenizer.json beside the dataset {data.path}",
                "Set data.tokenizer to one, or build a dataset with `elastic-trainer make-dataset`",
            )
        if path is None:
            facts = _read_facts(location)
            return Vocabulary(size=wanted or facts.get("vocab_size"), eos_id=facts.get("eos_id"))
        tokenizer = load_tokenizer(path, self._timeout_s)
        if wanted is not None and wanted < tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer {path} has {tokenizer.vocab_size} ids, but model.args.vocab_size "
                f"is {wanted}",
                f"Set model.args.vocab_size to {tokenizer.vocab_size} or more",
            )
        if data.format == "media":
            eos_of(tokenizer)
        return Vocabulary(
            size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer=tokenizer,
            tokenizer_path=path,
        )


def _read_facts(location: Location) -> Mapping[str, Any]:
    """What `dataset.json` says, nothing where there is none."""
    path = location.find_beside("dataset.json")
    if path is None:
        return {}
    try:
        facts = json.loads(location.read_bytes(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", "Build the dataset again") from error
    return facts if isinstance(facts, dict) else {}


def check_split(split: str) -> None:
    """Refuse a split other than train and eval."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}", f"Splits are {' and '.join(SPLITS)}")


def _check_settings(config: Config) -> None:
    data = config.data
    if data.format not in DATA_FORMATS:
        raise DataError(
            f"data.format is {data.format!r}", f"Set it to one of {', '.join(DATA_FORMATS)}"
        )
    if data.sequence_length < 1:
        raise DataError(
            f"data.sequence_length is {data.sequence_length}; a sequence has at least 1 token",
            "Set data.sequence_length to a positive number, such as 128",
        )
    positions = config.model.args.get("max_positions")
    is_sequence = data.format not in ("columns", "media")
    if is_sequence and isinstance(positions, int) and positions < data.sequence_length:
        raise DataError(
            f"data.sequence_length is {data.sequence_length}, but the model has "
            f"{positions} positions",
            "Lower data.sequence_length, or raise model.args.max_positions",
        )
    if data.format == "columns" and not data.input_columns:
        raise DataError(
            "data.format is columns, but data.input_columns is empty",
            "Name the columns that feed the first layer",
        )
