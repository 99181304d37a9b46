"""A user's own model and tables through Ray, and that no activation takes the way through Ray."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from elastic_trainer import fit
from elastic_trainer.testing.runs import (
    run_config,
    saved_state,
    synchronous_reference,
    training_batches,
)
from elastic_trainer.testing.toys import assert_same_states

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

OWN_MODEL = """
from torch import nn
from torch.nn.functional import smooth_l1_loss

def build(width):
    return nn.Sequential(
        nn.Linear(5, width), nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(width), nn.Linear(width, 1)
    )

def loss(output, labels):
    return smooth_l1_loss(output.squeeze(1), labels["weight"].float())
"""


def write_table(path: Path, num_rows: int, width: int, label: str) -> None:
    generator = np.random.default_rng(3)
    values = generator.standard_normal((num_rows, width)).astype(np.float32)
    features = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width)
    labels = pa.array(values.sum(axis=1) + 1)
    pq.write_table(pa.table({"features": features, label: labels}), path, row_group_size=8)


def losses(run_dir: Path) -> list[float]:
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


def test_a_model_and_a_loss_from_the_current_folder(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nn.Sequential, a loss that is a mean, and an epoch that ends in the middle of a batch."""
    name = "model_of_a_user"
    (tmp_path / f"{name}.py").write_text(OWN_MODEL)
    write_table(tmp_path / "table.parquet", 21, 5, "weight")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config: dict[str, Any] = {
        "model": {"target": f"{name}:build", "args": {"width": 12}},
        "loss": {"target": f"{name}:loss", "reduction": "mean"},
        "data": {
            "path": "table.parquet",
            "format": "columns",
            "input_columns": ["features"],
            "label_columns": ["weight"],
        },
        "train": {"global_batch_size": 8, "num_epochs": 2, "eval_batches": 0},
        "pipeline": {"microbatch_size": 4, "cuts": [2]},
        "optim": {"lr_schedule": "constant"},
    }
    result = fit(config, address=ray_address, run_dir="run", display=False)
    assert (result.status, result.update) == ("completed", 6), result
    run_dir = Path(result.run_dir)
    resolved = run_config(run_dir)
    sizes = [
        [m.num_samples for m in info.microbatches] for info, _ in training_batches(resolved, 1, 9)
    ]
    assert sizes == [[4, 4], [4, 4], [4, 1]] * 2
    oracle = synchronous_reference(resolved, 6)
    manifest, state = saved_state(run_dir)
    assert manifest.update == 6
    assert_same_states(state, oracle.layer_states())
    assert losses(run_dir) == oracle.losses
    sys.modules.pop(name)


def created_bytes(address: str) -> int:
    """Bytes ever put into the cluster's object store, by the raylet's own account."""
    state = get_state_from_address(address)  # type: ignore[no-untyped-call]
    reply = get_memory_info_reply(state)  # type: ignore[no-untyped-call]
    return int(reply.store_stats.cumulative_created_bytes)


def test_no_activation_enters_the_object_store(ray_address: str, tmp_path: Path) -> None:
    """Twenty megabytes cross a cut; Ray's object store sees none of them."""
    rows, hidden, num_updates = 512, 1024, 5
    microbatch = 128
    write_table(tmp_path / "table.parquet", rows, 16, "target")
    config: dict[str, Any] = {
        "model": {
            "name": "mlp",
            "args": {"input_dim": 16, "output_dim": 1, "hidden_dim": hidden, "num_layers": 3},
        },
        "data": {
            "path": str(tmp_path / "table.parquet"),
            "format": "columns",
            "input_columns": ["features"],
            "label_columns": ["target"],
        },
        "train": {"global_batch_size": rows, "max_steps": num_updates, "eval_batches": 0},
        "pipeline": {"microbatch_size": microbatch, "cuts": [1]},
    }
    before = created_bytes(ray_address)
    result = fit(config, address=ray_address, run_dir=tmp_path / "run", display=False)
    added = created_bytes(ray_address) - before
    assert (result.status, result.update) == ("completed", num_updates), result
    activation = microbatch * hidden * 4
    assert 2 * activation * (rows // microbatch) * num_updates > 20_000_000
    assert added < activation, "as much as one microbatch's activations went through Ray"

    oracle = synchronous_reference(run_config(tmp_path / "run"), num_updates)
    assert_same_states(saved_state(tmp_path / "run")[1], oracle.layer_states())
    assert losses(tmp_path / "run") == oracle.losses
    assert_the_measure_sees_one(ray_address, activation)


def assert_the_measure_sees_one(address: str, activation: int) -> None:
    before = created_bytes(address)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        reference = ray.put(np.zeros(activation, dtype=np.uint8))
        assert created_bytes(address) - before >= activation
        del reference
    finally:
        ray.shutdown()
