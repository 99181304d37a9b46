"""A checkpoint of P stages is the whole state of a pipeline of Q stages (no Ray: real runtimes)."""

import numpy as np
import pytest
import torch

from elastic_trainer.checkpoint.layers import read_layer, write_layer
from elastic_trainer.checkpoint.store import CheckpointStore, Manifest
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.models.registry import load_model
from elastic_trainer.pipeline.lr import lr_at
from elastic_trainer.testing.in_process import Batches, InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.oracle import SynchronousOracle
from elastic_trainer.testing.toys import assert_same_states
from elastic_trainer.types import Cursor

SAVED, LAST = 3, 4
STAGES = range(1, 7)


def settings() -> Config:
    """Eight layers, tied embeddings, dropout, clipping, a learning rate that moves every update."""
    return with_settings(
        Config(),
        model={
            "name": "gpt",
            "args": {
                "vocab_size": 31,
                "num_layers": 6,
                "dim": 8,
                "num_heads": 2,
                "dropout": 0.1,
                "tie_embeddings": True,
            },
        },
        data={"format": "synthetic", "sequence_length": 6},
        train={"global_batch_size": 4, "max_steps": 10, "max_grad_norm": 0.2},
        optim={"warmup_steps": 2},
        pipeline={"microbatch_size": 2},
    )


CONFIG = settings()
MODEL = load_model(CONFIG)


def batches(first: int, last: int, cursor: Cursor | None = None) -> tuple[Batches, Cursor]:
    """What the loader gives from a data position on, and the position behind it."""
    stream = BatchStream(CONFIG, "train", CONFIG.train.global_batch_size, cursor)
    found = {}
    for update in range(first, last + 1):
        info, microbatches = next(stream)
        found[update] = [
            {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in fields.items()}
            for fields in microbatches
        ]
    return found, info.end


@pytest.fixture(scope="module")
def oracle() -> tuple[SynchronousOracle, SynchronousOracle]:
    """One process, at the update that is saved and at the one after it."""
    data, _ = batches(1, LAST)
    references = []
    for stop in (SAVED, LAST):
        reference = SynchronousOracle(MODEL, CONFIG)
        for update in range(1, stop + 1):
            reference.update(update, data[update])
        references.append(reference)
    return references[0], references[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[CheckpointStore, Manifest]]:
    """A checkpoint written by each number of stages, each stage writing its own layers."""
    data, end = batches(1, SAVED)
    found = {}
    for num_stages in STAGES:
        plan = even_plan(MODEL, num_stages, "1f1b", num_microbatches=2)
        pipeline = InProcessPipeline(MODEL, CONFIG, plan, data)
        pipeline.train(1, SAVED)
        store = CheckpointStore(tmp_path_factory.mktemp(f"at{num_stages}"))
        files = [
            write_layer(store, SAVED, plan.layers.index(name), name, state)
            for runtime in pipeline.runtimes
            for name, state in runtime.layer_states().items()
        ]
        store.commit(SAVED, files, cursor=end, extra={})
        pipeline.close()
        found[num_stages] = store, CheckpointStore(store.root).manifest(SAVED)
    return found


@pytest.mark.parametrize("after", STAGES)
@pytest.mark.parametrize("before", STAGES)
def test_saved_at_p_loaded_at_q(
    before: int,
    after: int,
    saved: dict[int, tuple[CheckpointStore, Manifest]],
    oracle: tuple[SynchronousOracle, SynchronousOracle],
) -> None:
    store, manifest = saved[before]
    states = {layer.name: read_layer(store, manifest, layer.name) for layer in manifest.layers}
    data, _ = batches(LAST, LAST, manifest.cursor)
    expected, _ = batches(1, LAST)
    for ours, theirs in zip(data[LAST], expected[LAST], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    plan = even_plan(MODEL, after, "gpipe", num_microbatches=2)
    pipeline = InProcessPipeline(MODEL, CONFIG, plan, data)
    pipeline.load(states, SAVED)
    assert [runtime.committed for runtime in pipeline.runtimes] == [SAVED] * after
    held = pipeline.states()
    assert_same_states(held, oracle[0].layer_states())
    steps = [v for state in held.values() for k, v in state.items() if k.endswith("/step")]
    assert len(steps) > len(MODEL.layers) and {float(step) for step in steps} == {SAVED}

    # One more update: the learning rate and the step counts are those of an undisturbed run.
    pipeline.train(LAST, LAST)
    assert_same_states(pipeline.states(), oracle[1].layer_states())
    optimizers = [runtime._weights.optimizer for runtime in pipeline.runtimes]
    rates = {group["lr"] for o in optimizers if o for group in o.param_groups}
    assert rates == {lr_at(LAST, CONFIG.optim, CONFIG.train.max_steps)}
    pipeline.close()
