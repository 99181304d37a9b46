"""Shared by the tests of checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic_trainer.checkpoint.layers import write_layer
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile
from elastic_trainer.types import CheckpointInfo, Cursor

LAYERS = ("embed", "blocks.0", "head")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    ticks = iter(range(1, 1000))
    return CheckpointStore(tmp_path / "checkpoints", clock=lambda: float(next(ticks)))


@pytest.fixture
def state() -> Callable[[int, str], dict[str, Tensor]]:
    """A layer's state that differs by update and layer."""

    def make(update: int, name: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(update * 1000 + len(name))
        weight = torch.randn(4, 3, generator=generator)
        return {
            "param/weight": weight,
            "optim/weight/exp_avg": weight * 0.5,
            "optim/weight/step": torch.tensor(float(update)),
        }

    return make


@pytest.fixture
def save(
    state: Callable[[int, str], dict[str, Tensor]],
) -> Callable[..., CheckpointInfo]:
    """Write and commit a whole checkpoint."""

    def run(store: CheckpointStore, update: int, layers: Sequence[str] = LAYERS) -> CheckpointInfo:
        files: list[LayerFile] = [
            write_layer(store, update, index, name, state(update, name))
            for index, name in enumerate(layers)
        ]
        return store.commit(
            update, files, cursor=Cursor(epoch=1, row=update, offset=7), extra={"loss": 0.5}
        )

    return run
