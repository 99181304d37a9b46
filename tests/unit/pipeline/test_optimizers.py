"""Decay that stays out of the momentum, and state that fits the optimizer it is given to."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.config import Config, OptimConfig
from elastic_trainer.errors import CheckpointError
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.pipeline.optim import (
    build_optimizer,
    check_state,
    export_state,
    take_step,
)
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.oracle import DelayedOracle, SynchronousOracle


class Weight(nn.Module):
    """One number, which the input is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


MODEL = ModelSpec(
    layers=(LayerSpec("weight", Weight),),
    loss=lambda output, _: output.sum(),
    input_fields=("x",),
    label_fields=("y",),
)
# The gradient with respect to the weight is 1 in each of them.
BATCHES = {update: [{"x": torch.ones(1, 1), "y": torch.zeros(1)}] for update in (1, 2)}


def settings(**optim: object) -> Config:
    return with_settings(
        Config(),
        train={"max_steps": 2, "max_grad_norm": 0.0},
        optim={"lr_schedule": "constant", "learning_rate": 0.1, "weight_decay": 0.5, **optim},
    )


def by_pipeline(config: Config, schedule: str = "1f1b") -> InProcessPipeline:
    pipeline = InProcessPipeline(MODEL, config, even_plan(MODEL, 1, schedule), BATCHES)
    pipeline.train(1, 2)
    return pipeline


@pytest.mark.parametrize("schedule", ["1f1b", "async_1f1b"])
def test_the_decay_of_sgd_is_decoupled(schedule: str) -> None:
    """By hand: w = 2·0.95 - 0.1·1 = 1.8, then 1.8·0.95 - 0.1·(0.9·1 + 1) = 1.52.

    Coupled, the decay would be in the momentum: 1.8, then 1.8 - 0.1·(0.9·2 + 1.9) = 1.43.
    """
    config = settings(name="sgd", beta1=0.9)
    state = by_pipeline(config, schedule).states()["weight"]
    assert state["param/w"].item() == pytest.approx(1.52, abs=1e-6)
    assert state["optim/w/momentum_buffer"].item() == pytest.approx(1.9, abs=1e-6)


def test_the_oracles_decay_by_hand_too() -> None:
    config = settings(name="sgd", beta1=0.9)
    synchronous = SynchronousOracle(MODEL, config)
    for update, microbatches in BATCHES.items():
        synchronous.update(update, microbatches)
    delayed = DelayedOracle(MODEL, config, even_plan(MODEL, 1, "async_1f1b"))
    delayed.segment(1, [BATCHES[1][0], BATCHES[2][0]])
    for oracle in (synchronous, delayed):
        assert oracle.params["weight/w"].item() == pytest.approx(1.52, abs=1e-6)


@pytest.mark.parametrize("saved", ["adamw", "nadam", "sgd"])
@pytest.mark.parametrize("resumed", ["adamw", "nadam", "sgd"])
def test_state_of_another_optimizer_is_refused(saved: str, resumed: str) -> None:
    states = by_pipeline(settings(name=saved)).states()
    config = settings(name=resumed)
    target = InProcessPipeline(MODEL, config, even_plan(MODEL, 1, "1f1b"), BATCHES)
    if saved == resumed:
        target.load(states, 2)
        return
    with pytest.raises(CheckpointError) as caught:
        target.load(states, 2)
    text = str(caught.value)
    assert f"optim.name={resumed}" in text and "layer 'weight', w" in text
    assert "was saved with" in text and "\n" not in text


def test_a_parameter_that_was_never_stepped_has_no_state() -> None:
    for name in ("adamw", "nadam", "sgd"):
        check_state((), OptimConfig(name=name), "w")
    with pytest.raises(CheckpointError, match="momentum_buffer.*keeps none.*optim.beta1"):
        check_state(["momentum_buffer"], OptimConfig(name="sgd", beta1=0.0), "w")


@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd"])
def test_a_step_is_that_of_torch(name: str) -> None:
    config = settings(name=name).optim
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    mine, reference = build_optimizer([ours], config), build_optimizer([theirs], config)
    assert mine is not None and reference is not None
    for update in range(4):
        for parameter in (ours, theirs):
            parameter.grad = torch.linspace(-2, 3, 50) * (update - 1.5)
        take_step(mine)
        reference.step()
        assert torch.equal(ours, theirs) and ours.requires_grad
        kept = export_state(mine, ours)
        assert all(torch.equal(kept[k], v) for k, v in export_state(reference, theirs).items())


def test_a_worker_does_without_torchs_compiler() -> None:
    """Importing it takes about two seconds, while everybody waits for a worker that joins."""
    program = (
        "import sys, torch\n"
        "from elastic_trainer.config import OptimConfig\n"
        "from elastic_trainer.pipeline.optim import build_optimizer, take_step\n"
        "for name in ('adamw', 'nadam', 'sgd'):\n"
        "    parameter = torch.nn.Parameter(torch.ones(3))\n"
        "    parameter.grad = torch.ones(3)\n"
        "    take_step(build_optimizer([parameter], OptimConfig(name=name)))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
