"""Judging a finished run from its folder: what it saved, and what it should have computed."""

from pathlib import Path

import torch

from elastic_trainer.actors.loader import update_batch_size
from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.store import Manifest
from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.models.registry import load_model
from elastic_trainer.observability.record import CONFIG_FILE
from elastic_trainer.run.results import open_saved
from elastic_trainer.testing.oracle import SynchronousOracle
from elastic_trainer.types import BatchInfo, Cursor

State = dict[str, dict[str, torch.Tensor]]
Batch = tuple[BatchInfo, list[dict[str, torch.Tensor]]]


def run_config(run_dir: Path) -> Config:
    """The resolved configuration that a run has kept."""
    return load_config(run_dir / CONFIG_FILE)


def saved_state(run_dir: Path, checkpoint: str = "auto") -> tuple[Manifest, State]:
    """All layers of the newest (or the named) checkpoint."""
    saved = open_saved(run_dir, checkpoint)
    names = [layer.name for layer in saved.manifest.layers]
    return saved.manifest, {n: read_layer(saved.store, saved.manifest, n) for n in names}


def training_batches(
    config: Config, first: int, last: int, cursor: Cursor | None = None
) -> list[Batch]:
    """The batches of the updates `first` to `last`, of which the first begins at `cursor`."""
    stream = BatchStream(
        config,
        "train",
        update_batch_size(config),
        cursor,
        first_update=first,
        num_epochs=config.train.num_epochs,
    )
    return [
        (info, [{k: torch.from_numpy(v) for k, v in fields.items()} for fields in microbatches])
        for _, (info, microbatches) in zip(range(first, last + 1), stream, strict=False)
    ]


def synchronous_reference(config: Config, num_updates: int) -> SynchronousOracle:
    """One process that has done the first `num_updates` updates of this configuration."""
    oracle = SynchronousOracle(load_model(config), config)
    for info, microbatches in training_batches(config, 1, num_updates):
        oracle.update(info.update, microbatches)
    return oracle
