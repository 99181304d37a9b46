"""Synchronous pipelines compute what one process computes, bit for bit."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.models.gpt import gpt
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.models.losses import squared_error
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.oracle import State, SynchronousOracle
from elastic_trainer.testing.toys import assert_same_states, tiny_gpt, token_batches

NUM_UPDATES = 20


def settings(**sections: dict[str, object]) -> Config:
    base = with_settings(
        Config(), train={"max_steps": NUM_UPDATES, "max_grad_norm": 0.3}, optim={"warmup_steps": 3}
    )
    return with_settings(base, **sections)


@cache
def oracle(optimizer: str = "adamw", precision: str = "fp32") -> SynchronousOracle:
    config = settings(optim={"name": optimizer, "warmup_steps": 3})
    config = with_settings(config, train={"precision": precision})
    reference = SynchronousOracle(tiny_gpt(), config)
    for update, microbatches in token_batches(NUM_UPDATES).items():
        reference.update(update, microbatches)
    return reference


def run(config: Config, num_stages: int, schedule: str) -> InProcessPipeline:
    plan = even_plan(tiny_gpt(), num_stages, schedule)
    return InProcessPipeline(tiny_gpt(), config, plan, token_batches(NUM_UPDATES))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_everything_equals_the_oracle(schedule: str, num_stages: int, recompute: bool) -> None:
    """Tied embeddings, dropout, unequal valid counts, a small last microbatch, clipping."""
    want = oracle()
    pipeline = run(settings(model={"recompute": recompute}), num_stages, schedule)
    reports = [*pipeline.train(1, 7), *pipeline.train(8, NUM_UPDATES)]
    assert_same_states(pipeline.states(), want.layer_states())
    last = [u for r in reports if r.stage == num_stages - 1 for u in r.updates]
    assert [u.loss for u in last] == want.losses
    assert [u.grad_norm for u in last] == want.norms
    assert min(norm for norm in want.norms if norm) > 0.3, "clipping was never at work"
    others = [u.loss for r in reports if r.stage < num_stages - 1 for u in r.updates]
    assert set(others) <= {None}, "only the last stage knows the loss"
    pipeline.close()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_gradients_equal_the_oracle(num_stages: int) -> None:
    """The loss curve hides wrong weights of microbatches; gradients do not."""
    seen: dict[int, dict[str, Tensor]] = {}
    pipeline: InProcessPipeline

    def capture(stage: int) -> RuntimeHooks:
        def before(action: Action) -> None:
            if action.kind is Kind.OPT:
                grads = pipeline.runtimes[stage].gradients()
                at = seen.setdefault(action.microbatch // 3, {})
                at.update({name: grad.clone() for name, grad in grads.items()})

        return RuntimeHooks(before=before)

    hooks = {stage: capture(stage) for stage in range(num_stages)}
    plan = even_plan(tiny_gpt(), num_stages, "1f1b")
    batches = token_batches(NUM_UPDATES)
    pipeline = InProcessPipeline(tiny_gpt(), settings(), plan, batches, hooks=hooks)
    if num_stages == 1:  # an exchange of norms, which also brings gradients together
        assert any(a.kind is Kind.REDUCE for a in pipeline.segment("train", [1]).actions[0])
    pipeline.train(1, NUM_UPDATES)
    want = oracle().gradients
    for update in range(NUM_UPDATES):
        assert seen[update].keys() == want[update].keys()
        for name, grad in want[update].items():
            assert torch.equal(seen[update][name], grad), (update, name)
    pipeline.close()


@pytest.mark.parametrize("optimizer", ["nadam", "sgd"])
def test_other_optimizers_equal_the_oracle(optimizer: str) -> None:
    config = settings(optim={"name": optimizer, "warmup_steps": 3})
    pipeline = run(config, 3, "1f1b")
    pipeline.train(1, NUM_UPDATES)
    assert_same_states(pipeline.states(), oracle(optimizer).layer_states())
    pipeline.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_equals_the_oracle(recompute: bool) -> None:
    config = settings(model={"recompute": recompute})
    pipeline = run(with_settings(config, train={"precision": "bf16"}), 3, "1f1b")
    pipeline.train(1, NUM_UPDATES)
    assert_same_states(pipeline.states(), oracle(precision="bf16").layer_states())
    kinds = {value.dtype for state in pipeline.states().values() for value in state.values()}
    assert kinds == {torch.float32}, "autocast must not touch the state"
    pipeline.close()


def test_without_clipping_stages_agree_on_nothing() -> None:
    config = settings(train={"max_steps": NUM_UPDATES, "max_grad_norm": 0.0})
    reference = SynchronousOracle(tiny_gpt(), config)
    batches = token_batches(4)
    for update in batches:
        reference.update(update, batches[update])
    pipeline = run(config, 2, "1f1b")
    reports = pipeline.train(1, 4)
    assert_same_states(pipeline.states(), reference.layer_states())
    assert {u.grad_norm for r in reports for u in r.updates} == {None}
    pipeline.close()


def test_state_moves_to_other_cuts_in_the_middle() -> None:
    """Save at 3 stages after update 9, go on at 2 cut elsewhere: the same bits as undisturbed."""
    before = run(settings(), 3, "1f1b")
    before.train(1, 9)
    states: State = before.states()
    before.close()
    plan = even_plan(tiny_gpt(), 2, "gpipe", cuts=[4])
    after = InProcessPipeline(tiny_gpt(), settings(), plan, token_batches(NUM_UPDATES))
    after.load(states, 9)
    assert_same_states(after.states(), states)
    assert [runtime.committed for runtime in after.runtimes] == [9, 9]
    after.train(10, NUM_UPDATES)
    assert_same_states(after.states(), oracle().layer_states())
    after.close()


def test_live_activations_are_those_of_the_schedule() -> None:
    batches = token_batches(2, sizes=(2,) * 6)
    for schedule, peaks in (("1f1b", [4, 3, 2, 1]), ("gpipe", [6, 6, 6, 6])):
        plan = even_plan(tiny_gpt(), 4, schedule)
        pipeline = InProcessPipeline(tiny_gpt(), settings(), plan, batches)
        reports = pipeline.train(1, 2)
        assert [r.peak_live_activations for r in reports] == peaks
        assert [r.stash_copies for r in reports] == [0, 0, 0, 0]
        assert all(r.peak_activation_bytes > 0 for r in reports)
        pipeline.close()


def test_recompute_keeps_far_less() -> None:
    kept = {}
    for recompute in (False, True):
        pipeline = run(settings(model={"recompute": recompute}), 2, "1f1b")
        kept[recompute] = [r.peak_activation_bytes for r in pipeline.train(1, 1)]
        pipeline.close()
    assert all(less * 5 < more for less, more in zip(kept[True], kept[False], strict=True))


def test_phases_add_up_to_the_wall_clock() -> None:
    pipeline = run(settings(), 2, "1f1b")
    for report in pipeline.train(1, 3):
        assert sum(report.busy_s.values()) == pytest.approx(report.wall_s, rel=1e-6)
        assert min(report.busy_s.values()) >= 0
        assert report.busy_s["forward"] > 0 and report.busy_s["backward"] > 0
    assert report.sent_bytes > 0 and report.received_bytes > 0
    pipeline.close()


def test_evaluation_gives_the_sum_and_changes_nothing() -> None:
    held_out = token_batches(2, sizes=(3, 1), seed=7)
    plan = even_plan(tiny_gpt(), 3, "1f1b")
    train = token_batches(NUM_UPDATES)
    pipeline = InProcessPipeline(tiny_gpt(), settings(), plan, train, evaluation=held_out)
    pipeline.train(1, 10)
    states = pipeline.states()
    reports = pipeline.evaluate([1, 2])
    assert_same_states(pipeline.states(), states)
    assert [r.eval_num_valid for r in reports] == [0, 0, 3 * 7 + 6 + 3 * 7 + 6]
    quiet = InProcessPipeline(tiny_gpt(dropout=0.0), settings(), plan, train)
    want = SynchronousOracle(quiet.model, settings())
    for name, param in want.params.items():
        layer, key = name.split("/")
        param.data.copy_(states[layer][f"param/{key}"])
    losses = [
        want.forward(key, i, batch, want.params).item()
        for key, batches in held_out.items()
        for i, batch in enumerate(batches)
    ]
    assert reports[-1].eval_loss_sum == pytest.approx(sum(losses), rel=1e-6), "dropout is off"
    assert [r.peak_live_activations for r in reports] == [0, 0, 0]
    pipeline.train(11, NUM_UPDATES)
    assert_same_states(pipeline.states(), oracle().layer_states())
    pipeline.close()


class Trunk(nn.Module):
    """Passes on a tree: a number, an integer tensor, a float that is not used, and the stream."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(6) if norm else nn.ReLU(inplace=True)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tree: object) -> dict[str, object]:
        x = tree["stream"] if isinstance(tree, dict) else tree
        assert isinstance(x, Tensor)
        if not isinstance(self.norm, nn.BatchNorm1d) and isinstance(tree, dict):
            x = self.norm(x)  # writes into what came from the previous stage
            return {**tree, "stream": self.linear(x) * self.frozen}
        side = x.new_full((3,), 2.0, requires_grad=False) * self.unused.sum()
        x = self.norm(self.linear(x) * self.frozen)
        return {"stream": x, "count": 2, "index": torch.arange(3), "side": side, "none": None}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, tree: dict[str, Tensor]) -> Tensor:
        assert tree["none"] is None and tree["index"].tolist() == [0, 1, 2]
        y: Tensor = self.linear(tree["stream"]) * tree["count"]
        return y


def tree_model() -> ModelSpec:
    layers = (
        LayerSpec("a", lambda: Trunk(norm=True)),
        LayerSpec("b", lambda: Trunk(norm=False)),
        LayerSpec("c", Last),
    )
    return ModelSpec(layers, squared_error, ("inputs",), ("labels",))


def float_batches(num_updates: int) -> dict[int, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(3)

    def make(size: int) -> dict[str, Tensor]:
        x = torch.randn(size, 6, generator=generator)
        return {"inputs": x, "labels": x.sum(1, keepdim=True)}

    return {u: [make(5), make(3)] for u in range(1, num_updates + 1)}


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_trees_buffers_frozen_unused_and_in_place(num_stages: int) -> None:
    config = with_settings(Config(), train={"max_steps": 6})
    reference = SynchronousOracle(tree_model(), config)
    batches = float_batches(6)
    for update, microbatches in batches.items():
        copies = [{k: v.clone() for k, v in m.items()} for m in microbatches]
        reference.update(update, copies)
    plan = even_plan(tree_model(), num_stages, "1f1b")
    pipeline = InProcessPipeline(tree_model(), config, plan, batches)
    pipeline.train(1, 6)
    assert_same_states(pipeline.states(), reference.layer_states())
    assert int(pipeline.states()["a"]["buffer/norm.num_batches_tracked"]) == 12
    pipeline.close()


def test_recompute_counts_running_statistics_once() -> None:
    model = tree_model()
    layers = (model.layers[0], LayerSpec("c", Last))
    model = replace(model, layers=layers)
    batches = float_batches(4)
    found = []
    for recompute in (False, True):
        config = with_settings(Config(), train={"max_steps": 6}, model={"recompute": recompute})
        pipeline = InProcessPipeline(model, config, even_plan(model, 2, "1f1b"), batches)
        pipeline.train(1, 4)
        found.append(pipeline.states())
        pipeline.close()
    assert_same_states(found[1], found[0])


def test_a_tie_within_one_stage_shares_memory() -> None:
    model = gpt(vocab_size=31, num_layers=1, dim=16, max_positions=8, tie_embeddings=True)
    plan = even_plan(model, 1, "1f1b")
    pipeline = InProcessPipeline(model, settings(), plan, token_batches(2))
    pipeline.train(1, 2)
    states = pipeline.runtimes[0].layer_states()
    owner, follower = states["embed"]["param/tokens.weight"], states["head"]["param/linear.weight"]
    assert owner.data_ptr() == follower.data_ptr()
    assert "optim/linear.weight/exp_avg" not in states["head"]
    pipeline.close()
