"""Several loaders over real sockets: each sends its own stages their fields, and nothing shows of
it in the results.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from elastic_trainer.actors.loaders import agreed, feeding
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.elastic.instructions import INITIAL
from elastic_trainer.errors import DataError
from elastic_trainer.models.gpt import gpt
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.models.registry import load_model
from elastic_trainer.testing.crew import ThreadedCrew
from elastic_trainer.testing.in_process import even_plan, with_settings
from elastic_trainer.testing.toys import assert_same_states
from elastic_trainer.types import BatchInfo, Cursor, MicrobatchInfo

STAGES = ("stage-0", "stage-1", "stage-2")
UPDATES = 5
States = Mapping[str, Mapping[str, Tensor]]


class Hint(nn.Module):
    """A layer in the middle that reads the text, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        y: Tensor = x + self.embedding(input_ids)
        return y


def hinted_gpt(vocab_size: int) -> ModelSpec:
    """All three stages of its even plan need data."""
    model = gpt(
        vocab_size=vocab_size, num_layers=3, dim=8, num_heads=2, max_positions=6, dropout=0.0
    )
    layer = LayerSpec("hint", Hint, batch_fields=("input_ids",))
    return replace(model, layers=(*model.layers[:2], layer, *model.layers[2:]))


def settings(num_loaders: int) -> Config:
    sections: dict[str, Mapping[str, Any]] = {
        "model": {"target": "this_module:hinted_gpt", "args": {"vocab_size": 31}},
        "data": {"format": "synthetic", "sequence_length": 6, "num_loaders": num_loaders},
        "train": {"global_batch_size": 4, "max_steps": 20, "max_grad_norm": 0.2},
        "pipeline": {"microbatch_size": 2},
        "elastic": {"stall_limit_s": 20.0},
    }
    return with_settings(Config(), **sections)


@contextmanager
def crew(num_loaders: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedCrew]:
    monkeypatch.setattr("elastic_trainer.models.registry.load_target", lambda *_: hinted_gpt)
    config = settings(num_loaders)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        with ThreadedCrew(config, f"{folder}/s") as made:
            made.start(*STAGES)
            layers = load_model(config).names
            made.configure(made.make_plan(1, STAGES), 0, dict.fromkeys(layers, INITIAL))
            yield made


def trained(num_loaders: int, monkeypatch: pytest.MonkeyPatch, lost: str | None = None) -> States:
    """The states after some updates; a loader is lost on the way, if one is named."""
    with crew(num_loaders, monkeypatch) as made:
        made.train(2)
        if lost is not None:
            lose(made, lost)
        made.train(UPDATES - 2)
        return made.states()


def move(made: ThreadedCrew, workers: Sequence[str]) -> None:
    """Go on with these workers from the last committed update."""
    assert made.plan is not None
    sources = {
        layer: made.plan.stages[made.plan.stage_of_layer(i)].worker
        for i, layer in enumerate(made.plan.layers)
    }
    generation = made.plan.generation + 1
    made.take_stock(generation)
    made.configure(made.make_plan(generation, workers), made.committed, sources)


def lose(made: ThreadedCrew, lost: str) -> None:
    """A loader is lost after it has sent two batches more, which the stages never trained on."""
    assert made.plan is not None
    made.prepare(2)
    made.start_loader("loader-9", instead_of=lost)
    windows = {w: loader._window for w, loader in made.loaders.items()}
    move(made, STAGES)
    for worker, loader in made.loaders.items():
        assert (loader._window is windows[worker]) == (worker != "loader-9"), "others keep theirs"


@pytest.mark.parametrize("lost", [None, "loader-0", "loader-2"])
def test_results_do_not_depend_on_the_number_of_loaders(
    monkeypatch: pytest.MonkeyPatch, lost: str | None
) -> None:
    assert_same_states(trained(3, monkeypatch, lost), trained(1, monkeypatch))


def test_loaders_that_get_other_stages_make_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(3, monkeypatch) as made:
        made.train(1)
        made.prepare(1)  # never trained on: it comes again, with other fields
        move(made, STAGES[:1])
        assert made.feeding is not None and made.feeding.serving == ["loader-0"]
        made.train(2)
        made.prepare(1)
        move(made, STAGES)
        made.train(UPDATES - 3)
        states = made.states()
    assert_same_states(states, trained(1, monkeypatch))


def test_each_makes_what_its_stages_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(4, monkeypatch) as made:
        made.train(1)
        assert made.feeding is not None
        assert made.feeding.loader_of == dict(zip(STAGES, list(made.loaders)[:3], strict=True))
        assert made.feeding.serving == ["loader-0", "loader-1", "loader-2"]
        kept = []
        for loader in list(made.loaders.values())[:3]:
            assert loader._window is not None
            (_, microbatches), *_ = loader._window._kept
            kept.append(set(microbatches[0]))
        assert kept == [{"input_ids"}, {"input_ids"}, {"labels"}]
        assert made.loaders["loader-3"]._ahead is None, "it has nothing to do"


def test_what_is_said_of_a_batch_does_not_depend_on_the_fields() -> None:
    config = settings(1)
    whole = BatchStream(config, "train", 4)
    parts = {f: BatchStream(config, "train", 4, fields={f}) for f in ("input_ids", "labels")}
    nothing = BatchStream(config, "train", 4, fields=())
    for _ in range(3):
        info, microbatches = next(whole)
        for name, stream in parts.items():
            told, found = next(stream)
            assert told == info
            for fields, want in zip(found, microbatches, strict=True):
                assert list(fields) == [name]
                np.testing.assert_array_equal(fields[name], want[name])
        assert next(nothing) == (info, [{} for _ in microbatches])


def batch(update: int, *ids: str) -> BatchInfo:
    micro = MicrobatchInfo(num_samples=len(ids), num_tokens=8, num_valid=8, sample_ids=ids)
    return BatchInfo(update=update, microbatches=(micro,), end=Cursor(row=update))


def test_loaders_must_agree() -> None:
    batches = [batch(4, "0", "1"), batch(5, "2", "3")]
    assert agreed({"loader-0": batches, "loader-1": list(batches)}) is batches
    with pytest.raises(DataError, match="loader-7 reads .* loader-0: .* the batch of update 5"):
        agreed({"loader-0": batches, "loader-7": [batches[0], batch(5, "2", "4")]})
    with pytest.raises(DataError, match="differ in where the data ends") as caught:
        agreed({"loader-0": batches, "loader-1": batches[:1]})
    assert "data.num_loaders=1" in str(caught.value)


def test_a_stage_without_data_has_no_loader() -> None:
    config = settings(1)
    plan = even_plan(
        load_model(with_settings(config, model={"name": "emulated", "target": None, "args": {}})),
        3,
        "1f1b",
    )
    told = {
        "node_ip": "a",
        "input_fields": ["input_ids"],
        "label_fields": ["labels"],
        "batch_fields": [[] for _ in plan.layers],
    }
    found = feeding(plan, dict.fromkeys(STAGES, told), {"x": {"node_ip": "a"}})
    assert found.loader_of == {"stage-0": "x", "stage-2": "x"}
    assert found.routes == {"x": {"input_ids": ["stage-0"], "labels": ["stage-2"]}}
    assert found.receivers("x") == ["stage-0", "stage-2"]
