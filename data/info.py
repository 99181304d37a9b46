"""What the trainer needs to know of a dataset before it starts; reads footers, not data."""

from dataclasses import dataclass
from hashlib import sha256

from elastic_trainer.config import Config
from elastic_trainer.data.dataset import Dataset
from elastic_trainer.data.media.collate import INPUT_FIELDS
from elastic_trainer.data.synthetic import NUM_ROWS
from elastic_trainer.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInfo:
    """Facts of a dataset.

    `num_eval_rows` is None where nothing is held out. `vocab_size` is the number of token ids, None
    where ids play no part or nothing tells. `fields` are the arrays of a microbatch, those that
    feed the first layer and those that feed the loss. `fingerprint` changes with the rows, their
    files, the tokenizer and the settings that decide the order: a position saved under another
    fingerprint means other samples.
    """

    num_rows: int
    num_eval_rows: int | None
    vocab_size: int | None
    eos_id: int | None
    input_fields: tuple[str, ...]
    label_fields: tuple[str, ...]
    tokenizer_path: str | None
    fingerprint: str

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.input_fields + self.label_fields))


def describe(config: Config) -> DataInfo:
    """Open the dataset that the configuration names and say what is in it."""
    dataset = Dataset(config)
    data, vocabulary = config.data, dataset.vocabulary
    num_eval_rows: int | None
    input_fields: tuple[str, ...] = ("input_ids",)
    label_fields: tuple[str, ...] = ("labels",)
    if data.format == "synthetic":
        num_rows, num_eval_rows = NUM_ROWS["train"], NUM_ROWS["eval"]
        rows = f"synthetic/{vocabulary.size}"
        if data.size_sigma:
            rows += f"/{data.size_sigma}"
    else:
        source, held_out = dataset.source("train"), dataset.source("eval")
        if source is None:
            raise DataError(f"the dataset {data.path} has no training data", "Set data.path")
        num_rows, rows = source.num_rows, source.fingerprint
        num_eval_rows = held_out.num_rows if held_out else None
    if data.format == "columns":
        input_fields, label_fields = tuple(data.input_columns), tuple(data.label_columns)
    elif data.format == "media":
        input_fields = INPUT_FIELDS
    order = (rows, vocabulary.fingerprint, data.sequence_length, data.shuffle, config.train.seed)
    return DataInfo(
        num_rows=num_rows,
        num_eval_rows=num_eval_rows,
        vocab_size=vocabulary.size,
        eos_id=vocabulary.eos_id,
        input_fields=input_fields,
        label_fields=label_fields,
        tokenizer_path=vocabulary.tokenizer_path,
        fingerprint=sha256(repr(order).encode()).hexdigest()[:16],
    )
