"""Byte-level BPE tokenizers: training one, loading any `tokenizer.json`."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from elastic_trainer.data.location import REMOTE_TIMEOUT_S, Location
from elastic_trainer.data.packing import Tokens
from elastic_trainer.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_SMALLEST_VOCABULARY = 257


class Tokenizer:
    """A loaded tokenizer: text to ids and back, and which id ends a document."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # Text that happens to spell a special token must stay text: a row could otherwise smuggle
        # in an end of document.
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        ids = (inner.token_to_id(name) for name in _END_NAMES)
        self.eos_id: int | None = next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens around it."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of several texts, encoded in parallel."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int32) for e in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end of a document shows as nothing."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def to_json(self) -> str:
        """What a `tokenizer.json` holds."""
        return str(self._inner.to_str())


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose only special token is <|endoftext|>."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level vocabulary needs at least {_SMALLEST_VOCABULARY} entries "
            f"(256 bytes and {END_OF_TEXT}), {vocab_size} asked for",
            "Set a larger vocab_size",
        )
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def load_tokenizer(path: str, timeout_s: float = REMOTE_TIMEOUT_S) -> Tokenizer:
    """Load a `tokenizer.json` from a local path or URI; a folder means the one inside it."""
    from tokenizers import Tokenizer as Inner

    location = Location(path, timeout_s)
    file = location.path
    if not location.exists(file):
        inside = f"{file}/tokenizer.json"
        if not location.exists(inside):
            raise DataError(
                f"there is no tokenizer at {path}",
                "Set data.tokenizer to a tokenizer.json, or null for the one beside the dataset",
            )
        file = inside
    content = location.read_bytes(file)
    try:
        return Tokenizer(Inner.from_buffer(content))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"{path} is not a tokenizer.json that the tokenizers library reads: {error}",
            "Save it with tokenizers or transformers again",
        ) from error


def find_tokenizer(dataset: Location, setting: str | None) -> str | None:
    """Path of the configured tokenizer, or of the one beside the dataset; None without either."""
    if setting:
        return setting
    found = dataset.find_beside("tokenizer.json")
    return None if found is None else dataset.uri(found)
