"""A small multimodal model, and microbatches with none to only pictures or clips: for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.data.media.collate import Decoded, collate
from elastic_trainer.models.layers import ModelSpec
from elastic_trainer.models.multimodal import multimodal

VOCAB_SIZE = 29
EOS_ID = 0
PATCH_SIZE = 2
MEL_BINS = 5

# Rows and columns of cells (of two by two patches) of each picture; frames of each clip; tokens.
Shape = tuple[Sequence[tuple[int, int]], Sequence[int], int]
ONLY_TEXT: Shape = ((), (), 5)
PICTURE: Shape = (((2, 1),), (), 3)
CLIP: Shape = ((), (9,), 4)
BOTH: Shape = (((1, 1),), (6,), 2)
SEVERAL: Shape = (((1, 2), (3, 1), (1, 1)), (1, 14), 6)


def tiny_multimodal(**settings: Any) -> ModelSpec:
    """Eleven layers; dropout unless told otherwise."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "patch_size": PATCH_SIZE,
        "mel_bins": MEL_BINS,
        "vision_layers": 2,
        "audio_layers": 1,
        "lm_layers": 2,
        "dim": 8,
        "num_heads": 2,
        "dropout": 0.1,
    }
    return multimodal(**{**defaults, **settings})


def random_sample(shape: Shape, rng: np.random.Generator) -> Decoded:
    """A sample of this shape, of random numbers."""
    pictures, clips, num_tokens = shape
    return Decoded(
        [_picture(rows, columns, rng) for rows, columns in pictures],
        [rng.normal(size=(frames, MEL_BINS)).astype(np.float32) for frames in clips],
        rng.integers(1, VOCAB_SIZE, num_tokens).tolist(),
    )


def _picture(rows: int, columns: int, rng: np.random.Generator) -> tuple[Any, Any]:
    patches = rng.integers(0, 256, (4 * rows * columns, 3 * PATCH_SIZE**2)).astype(np.uint8)
    return patches, np.argwhere(np.ones((2 * rows, 2 * columns), bool))


def microbatch(samples: Sequence[Decoded]) -> dict[str, Tensor]:
    """These samples as the fields that stages get."""
    fields = collate(samples, eos_id=EOS_ID, patch_size=PATCH_SIZE, mel_bins=MEL_BINS)
    return {name: torch.from_numpy(array) for name, array in fields.items()}


def media_batches(
    updates: Sequence[Sequence[Sequence[Shape]]], seed: int = 0
) -> dict[int, list[dict[str, Tensor]]]:
    """Random microbatches of these shapes of samples, for updates 1, 2, …"""
    rng = np.random.default_rng(seed)
    return {
        number: [microbatch([random_sample(s, rng) for s in shapes]) for shapes in update]
        for number, update in enumerate(updates, start=1)
    }
