"""From decoded samples to the fields of one microbatch, all packed into one long sequence.

A sample is its pictures, its clips, a token that opens the text, the text, and the same token to
end it:

    input_ids   -1 -1 … -2 -2 …  <eos>  t0  t1  …  tn      -1 a picture's place, -2 a clip's
    labels      .. .. … .. .. …  t0     t1  t2  …  <eos>   -100 where nothing is to be said

Fields of a microbatch (`sum n` over all pictures of all samples, `sum f` over all clips):

    patches (sum n, 3 p p) uint8     patch_grid (sum n, 2)   image_lengths (pictures,)
    frames (sum f, bins) float32     clip_lengths (clips,)
    input_ids, labels, positions (place in the sample), segments (sample, -1: padding), (1, T) each

What a microbatch has none of has length zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.packing import IGNORED_LABEL
from elastic_trainer.data.samples import Fields
from elastic_trainer.planner.sizes import AUDIO_PLACE, IMAGE_PLACE, audio_tokens, image_tokens

INPUT_FIELDS = (
    *("patches", "patch_grid", "image_lengths", "frames", "clip_lengths"),
    *("input_ids", "positions", "segments"),
)
_TEXT_FIELDS = ("input_ids", "labels", "positions", "segments")


@dataclass(frozen=True, slots=True)
class Decoded:
    """A sample ready to be fed: patches and grid of each picture, frames of each clip, token ids.

    Args:
        pictures: as `patchify` gives them.
        clips: as `log_mel` gives them.
        tokens: ids of the text.
    """

    pictures: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]]
    clips: Sequence[NDArray[np.float32]]
    tokens: Sequence[int]


def opened_text_tokens(num_tokens: int) -> int:
    """Places of a text in the sequence: the token that opens it comes in addition."""
    return 1 + num_tokens


def collate(samples: Sequence[Decoded], *, eos_id: int, patch_size: int, mel_bins: int) -> Fields:
    """The fields of a microbatch of these samples, in order; of none: one place of padding."""
    pictures = [picture for sample in samples for picture in sample.pictures]
    clips = [clip for sample in samples for clip in sample.clips]
    texts = [_text(sample, number, eos_id) for number, sample in enumerate(samples)]
    if not texts:
        texts = [_padding(eos_id)]
    fields: Fields = {
        "patches": _joined([p for p, _ in pictures], (3 * patch_size**2,), np.uint8),
        "patch_grid": _joined([grid for _, grid in pictures], (2,), np.int64),
        "image_lengths": np.array([len(p) for p, _ in pictures], np.int64),
        "frames": _joined(clips, (mel_bins,), np.float32),
        "clip_lengths": np.array([len(clip) for clip in clips], np.int64),
    }
    for name, parts in zip(_TEXT_FIELDS, zip(*texts, strict=True), strict=True):
        fields[name] = np.concatenate(parts)[None]
    return fields


def _text(sample: Decoded, number: int, eos_id: int) -> tuple[NDArray[np.int64], ...]:
    places = [IMAGE_PLACE] * sum(image_tokens(len(p)) for p, _ in sample.pictures)
    places += [AUDIO_PLACE] * sum(audio_tokens(len(clip)) for clip in sample.clips)
    ids = np.array([*places, eos_id, *sample.tokens], np.int64)
    labels = np.full(len(ids), IGNORED_LABEL, np.int64)
    labels[len(places) :] = [*sample.tokens, eos_id]
    return ids, labels, np.arange(len(ids)), np.full(len(ids), number, np.int64)


def _padding(eos_id: int) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.array([value], np.int64) for value in (eos_id, IGNORED_LABEL, 0, -1))


def _joined(parts: Sequence[NDArray[Any]], shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros((0, *shape), kind)
