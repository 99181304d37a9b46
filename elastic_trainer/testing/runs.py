"""Judging a finished run from its folder: what it saved, and what it should have computed."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic_trainer.actors.loader import update_batch_size
from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.store import Manifest
from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.media import decoders
from elastic_trainer.models.registry import load_model
from elastic_trainer.observability.record import CONFIG_FILE
from elastic_trainer.observability.runs import (
    read_audit,
    read_membership,
    read_status,
    read_updates,
)
from elastic_trainer.run.results import checkpoints, open_saved
from elastic_trainer.testing.oracle import DelayedOracle, SynchronousOracle
from elastic_trainer.testing.toys import assert_same_states
from elastic_trainer.types import BatchInfo, Cursor, Plan, WorkerId

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
    with decoders.kept():
        return [
            (info, [{k: torch.from_numpy(v) for k, v in fields.items()} for fields in microbatches])
            for _, (info, microbatches) in zip(range(first, last + 1), stream, strict=False)
        ]


def _awake(config: Config) -> Config:
    """Emulated layers that do not sleep: they compute the same."""
    if config.model.name != "emulated" or config.model.target is not None:
        return config
    args = {**config.model.args, "forward_s": 0.0, "backward_s": 0.0}
    return replace(config, model=replace(config.model, args=args))


def synchronous_reference(config: Config, num_updates: int) -> SynchronousOracle:
    """One process that has done the first `num_updates` updates of this configuration."""
    config = _awake(config)
    oracle = SynchronousOracle(load_model(config), config)
    for info, microbatches in training_batches(config, 1, num_updates):
        oracle.update(info.update, microbatches)
    return oracle


def asynchronous_reference(
    config: Config, num_updates: int, plan: Plan, commit_every: int
) -> DelayedOracle:
    """The same, asynchronously: as many stages all the time as in `plan`, cut as there."""
    config = _awake(config)
    oracle = DelayedOracle(load_model(config), config, plan)
    batches = training_batches(config, 1, num_updates)
    for first in range(0, num_updates, commit_every):
        segment = batches[first : first + commit_every]
        oracle.segment(first + 1, [micro for _, (micro,) in segment])
    return oracle


def assert_same_as_undisturbed(
    run_dir: Path, updates: int, oracle: SynchronousOracle | DelayedOracle | None = None
) -> None:
    """Parameters, moments, losses and samples are those of one process that nobody disturbed.

    Args:
        updates: that the run has done.
        oracle: has done them, too; None: of a synchronous run.
    """
    oracle = oracle or synchronous_reference(run_config(run_dir), updates)
    assert_same_states(saved_state(run_dir)[1], oracle.layer_states())
    lines = read_updates(run_dir)
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    assert [line["loss"] for line in lines] == oracle.losses
    assert_samples_once(run_dir, updates)


def assert_samples_once(run_dir: Path, updates: int) -> None:
    """Each update was trained on the samples that it would have had undisturbed."""
    want = [
        (info.update, [list(micro.sample_ids) for micro in info.microbatches])
        for info, _ in training_batches(run_config(run_dir), 1, updates)
    ]
    assert [(line["update"], line["samples"]) for line in read_audit(run_dir)] == want


def assert_checkpoints_undisturbed(run_dir: Path) -> SynchronousOracle:
    """Every checkpoint of a synchronous run holds what it should; gives who has done them all."""
    config = run_config(run_dir)
    updates = {info.update for info in checkpoints(run_dir)}
    oracle = synchronous_reference(config, 0)
    for info, microbatches in training_batches(config, 1, max(updates)):
        oracle.update(info.update, microbatches)
        if info.update in updates:
            found = saved_state(run_dir, str(info.update))[1]
            assert_same_states(found, oracle.layer_states())
    return oracle


def holders(run_dir: Path) -> dict[int, WorkerId]:
    """Who holds which stage now."""
    workers = read_status(run_dir).get("workers", {})
    return {w["stage"]: name for name, w in workers.items() if w["stage"] is not None}


def causes(run_dir: Path) -> list[str]:
    """Of all changes of the membership, oldest first."""
    return [change["cause"] for change in read_membership(run_dir)]
