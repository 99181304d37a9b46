"""Does a captions run use what it sees and hears? The held-out loss of its newest checkpoint with
the true pictures and sound, and with those of other samples.

    elastic-trainer train captions --run-dir runs/captions
    python benchmarks/grounding.py runs/captions --json

A sample's pictures, its clips, or both are replaced by those of the sample `SHIFT` places on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from common import figure, show

from elastic_trainer.data.dataset import Dataset
from elastic_trainer.data.media.collate import Decoded
from elastic_trainer.data.media.reader import MediaSamples
from elastic_trainer.data.samples import Sample
from elastic_trainer.models.inference import Unsplit
from elastic_trainer.models.registry import load_model
from elastic_trainer.testing.runs import run_config, saved_state
from elastic_trainer.types import Cursor

SHIFTS = (37, 101, 151)  # primes: neither all of a picture's languages, nor one language
BATCH = 32


def held_out(reader: MediaSamples) -> list[Decoded]:
    """All held-out samples that can be read."""
    samples: list[Sample] = []
    cursor = Cursor()
    while cursor.epoch == 0:
        samples.append(reader.next(cursor))
        cursor = samples[-1].end
    return [found for found in reader.decode(samples) if isinstance(found, Decoded)]


def shifted(samples: Sequence[Decoded], pictures: int, clips: int) -> list[Decoded]:
    """Each text with the pictures and the clips of samples further on."""
    count = len(samples)
    return [
        Decoded(
            samples[(i + pictures) % count].pictures,
            samples[(i + clips) % count].clips,
            sample.tokens,
        )
        for i, sample in enumerate(samples)
    ]


def loss(model: Unsplit, reader: MediaSamples, samples: Sequence[Decoded]) -> float:
    """Mean loss per token."""
    batches = (
        {
            name: torch.from_numpy(array)
            for name, array in reader.collate(samples[start : start + BATCH]).items()
        }
        for start in range(0, len(samples), BATCH)
    )
    total, num_valid = model.evaluate(batches)
    return total / num_valid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    config = run_config(options.run)
    reader = Dataset(config).reader("eval")
    assert isinstance(reader, MediaSamples), "the run does not read format media"
    manifest, state = saved_state(options.run)
    model = Unsplit(load_model(config), state, seed=config.train.seed)
    samples = held_out(reader)
    losses = {
        "true": [loss(model, reader, samples)],
        "other_pictures": [loss(model, reader, shifted(samples, by, 0)) for by in SHIFTS],
        "other_sound": [loss(model, reader, shifted(samples, 0, by)) for by in SHIFTS],
        "other_pictures_and_sound": [
            loss(model, reader, shifted(samples, by, by)) for by in SHIFTS
        ],
    }
    figures = {f"held_out_loss_{name}": figure(found, "nats") for name, found in losses.items()}
    show(figures, options.json, update=manifest.update, samples=len(samples))


if __name__ == "__main__":
    main()
