"""The check of the model in a process of its own says what the check here would say."""

import sys
from pathlib import Path

import pytest

import elastic_trainer.run.model_check as model_check
from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import ModelError, PlanError
from elastic_trainer.run.model_check import ModelCheck
from elastic_trainer.run.prepare import check_model

LOCAL = ["cluster.address=local", "data.format=synthetic", "train.max_steps=1"]


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has not loaded torch yet."""
    monkeypatch.delitem(sys.modules, "torch")


def config(*overrides: str) -> Config:
    return load_config({"model": {"name": "emulated"}}, [*LOCAL, *overrides])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of the user's."""
    source = "from torch import nn\ndef layers():\n    return [nn.Linear(2, 2) for _ in range(8)]\n"
    (tmp_path / "own_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return "model.target=own_model:layers"


def test_a_process_counts_the_layers(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setattr(model_check, "check_model", None)  # not in this one
    check = ModelCheck(config("cluster.num_workers=3", own))
    assert check.result() == 8
    check.close()


def test_a_shipped_model_needs_none() -> None:
    check = ModelCheck(config("cluster.num_workers=3"))
    assert check._process is None and check.result() == 8
    assert "torch" not in sys.modules
    with pytest.raises(PlanError, match="9 stages"):
        ModelCheck(config("cluster.num_workers=9"))


def test_its_errors_are_those_of_the_check_itself(
    monkeypatch: pytest.MonkeyPatch, own: str, tmp_path: Path
) -> None:
    too_many = config("cluster.num_workers=9", own)
    with pytest.raises(PlanError) as there:
        ModelCheck(too_many).result()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError) as here:
        check_model(too_many)
    assert str(there.value) == str(here.value)


def test_a_module_that_prints_or_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "print('hello')\nfrom torch import nn\ndef layers():\n    return [nn.Linear(2, 2)]\n"
    (tmp_path / "talks_at_import.py").write_text(source)
    (tmp_path / "ends_at_import.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    talks = config("cluster.num_workers=1", "model.target=talks_at_import:layers")
    assert ModelCheck(talks).result() == 1
    with pytest.raises(ModelError, match="process that builds the model"):
        ModelCheck(config("model.target=ends_at_import:layers")).result()


def test_closing_ends_the_process(own: str) -> None:
    check = ModelCheck(config(own))
    process = check._process
    assert process is not None and process.poll() is None
    check.close()
    assert process.poll() is not None
