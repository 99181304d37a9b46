"""Several loaders on a real cluster, one of which is killed: nothing shows of it in the results."""

import os
import signal
from pathlib import Path

import pytest

from elastic_trainer import fit
from elastic_trainer.observability.runs import (
    read_audit,
    read_events,
    read_membership,
    read_status,
    read_updates,
)
from elastic_trainer.testing.processes import (
    LIMIT_S,
    Cluster,
    has_updates,
    loader_pids,
    once_started,
    wait_for,
)
from elastic_trainer.testing.runs import (
    run_config,
    saved_state,
    synchronous_reference,
    training_batches,
)
from elastic_trainer.testing.toys import assert_same_states

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

NUM_UPDATES = 80
CONFIG = {
    "model": {
        "name": "gpt",
        "args": {"vocab_size": 61, "num_layers": 2, "dim": 16, "num_heads": 2, "dropout": 0.1},
    },
    "data": {"format": "synthetic", "sequence_length": 8, "num_loaders": 2},
    "train": {"global_batch_size": 4, "max_steps": NUM_UPDATES, "eval_batches": 2},
    "pipeline": {"microbatch_size": 2, "segment_updates": 3},
    # The test shares two cores with others: a worker that misses its turn is not lost.
    "elastic": {"stall_limit_s": 60.0, "lease_limit_s": 30.0},
}


def test_a_killed_loader_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def kill() -> None:
        wait_for(has_updates(run_dir, 12), "updates")
        loaders = read_status(run_dir)["loaders"]
        assert {w: f["state"] for w, f in loaders.items()} == {
            "loader-0": "serving",
            "loader-1": "serving",
        }
        os.kill(loader_pids(run_dir)["loader-1"], signal.SIGKILL)
        wait_for(lambda: "loader-2" in read_status(run_dir)["loaders"], "its successor")

    killed = once_started(run_dir, kill)
    result = fit(CONFIG, address=cluster.address, run_dir=run_dir, workers="2", display=False)
    killed.result(LIMIT_S)
    assert (result.status, result.update) == ("completed", NUM_UPDATES), result

    config = run_config(run_dir)
    oracle = synchronous_reference(config, NUM_UPDATES)
    assert_same_states(saved_state(run_dir)[1], oracle.layer_states())
    assert [line["loss"] for line in read_updates(run_dir)] == oracle.losses
    want = [
        (info.update, [list(micro.sample_ids) for micro in info.microbatches])
        for info, _ in training_batches(config, 1, NUM_UPDATES)
    ]
    audit = [(line["update"], line["samples"]) for line in read_audit(run_dir)]
    assert audit == want
    seen = [sample for _, microbatches in audit for ids in microbatches for sample in ids]
    assert len(seen) == len(set(seen)) == 4 * NUM_UPDATES, "each sample exactly once"

    (lost,) = [e for e in read_events(run_dir) if e["kind"] == "lost"]
    assert lost["message"].startswith("loader-1 (node ")
    change = read_membership(run_dir)[-1]
    assert (change["cause"], change["worker"]) == ("loader_lost", "loader-1")
    assert change["outcome"] == "committed" and change["workers_after"] == 2
