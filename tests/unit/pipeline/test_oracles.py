"""The oracles themselves, judged in float64 by plain loops that share tied weights for real."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.models.layers import ModelSpec, build_layers
from elastic_trainer.models.losses import count_valid
from elastic_trainer.testing.in_process import even_plan, with_settings
from elastic_trainer.testing.oracle import DelayedOracle, SynchronousOracle, plain_steps
from elastic_trainer.testing.toys import tiny_gpt, token_batches

TOLERANCE = 1e-10


def loss_sum(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"].reshape(-1)
    return F.cross_entropy(output.flatten(0, 1), labels, ignore_index=-100, reduction="sum")


def model() -> ModelSpec:
    return replace(tiny_gpt(dropout=0.0), loss=loss_sum)


def shared(seed: int) -> nn.Sequential:
    whole = nn.Sequential(*build_layers(model(), 0, 6, seed).values()).double()
    whole[5].linear.weight = whole[0].tokens.weight  # type: ignore[union-attr]
    return whole


def largest_difference(params: Mapping[str, Tensor], whole: nn.Sequential) -> float:
    names = model().names
    worst = 0.0
    for index, module in enumerate(whole):
        for name, param in module.named_parameters():
            ours = params[f"{names[index]}/{name}"]
            worst = max(worst, (ours - param).abs().max().item())
    return worst


def test_synchronous_oracle_equals_a_plain_loop() -> None:
    config = with_settings(
        Config(),
        train={"max_steps": 20, "max_grad_norm": 0.3},
        optim={"lr_schedule": "constant", "learning_rate": 0.01},
    )
    two = token_batches(2)
    batches = {update: two[1 + update % 2] for update in range(1, 21)}
    oracle = SynchronousOracle(model(), config, torch.float64)
    for update, microbatches in batches.items():
        oracle.update(update, microbatches)
    whole = shared(config.train.seed)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.01)
    joined = []
    for microbatches in batches.values():
        batch = {k: torch.cat([m[k] for m in microbatches]) for k in ("input_ids", "labels")}
        joined.append((batch, count_valid({"labels": batch["labels"]})))
    losses = plain_steps(
        whole, optimizer, lambda module, b: loss_sum(module(b["input_ids"]), b), joined, 0.3
    )
    assert largest_difference(oracle.params, whole) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(losses, oracle.losses, strict=True)) < TOLERANCE
    assert losses[-1] < losses[0], "it learned nothing, so it shows nothing"


def test_delayed_oracle_equals_a_plain_recurrence() -> None:
    """w_{j+1} = w_j - lr * g(w_{j-delay}), the delay of each weight that of its stage."""
    lr = 0.1
    config = with_settings(
        Config(),
        train={"max_steps": 20, "max_grad_norm": 0.0},
        optim={
            "name": "sgd",
            "beta1": 0.0,
            "weight_decay": 0.0,
            "learning_rate": lr,
            "lr_schedule": "constant",
        },
    )
    spec = model()
    batches = [microbatches[0] for microbatches in token_batches(2).values()] * 6
    oracle = DelayedOracle(spec, config, even_plan(spec, 3, "async_1f1b"), torch.float64)
    oracle.segment(1, batches)
    whole = shared(config.train.seed)
    delays = [2, 2, 1, 1, 0, 0]  # two layers a stage; the tied weight belongs to the first
    late = {name: delays[int(name.split(".")[0])] for name, _ in whole.named_parameters()}
    history = [{name: p.detach().clone() for name, p in whole.named_parameters()}]
    for j, batch in enumerate(batches):
        with torch.no_grad():
            for name, param in whole.named_parameters():
                param.copy_(history[max(0, j - late[name])][name])
        whole.zero_grad()
        loss = loss_sum(whole(batch["input_ids"]), batch) / count_valid({"l": batch["labels"]})
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        history.append({name: history[j][name] - lr * grads[name] for name in history[j]})
    with torch.no_grad():
        for name, param in whole.named_parameters():
            param.copy_(history[-1][name])
    assert largest_difference(oracle.params, whole) < TOLERANCE
    assert oracle.losses[-1] < oracle.losses[0]
