"""Models and losses named in the configuration, and what is said of those that do not load."""

from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from elastic_trainer.config import (
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from elastic_trainer.errors import ModelError
from elastic_trainer.models.layers import ModelSpec, build_layers, first_input, ties
from elastic_trainer.models.losses import count_valid, default_loss
from elastic_trainer.models.registry import SHIPPED, load_model

MODULE = """
    import collections, torch
    from torch import nn
    from elastic_trainer.models.layers import LayerSpec

    number = 3
    def sequential(width=4): return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2))
    def listed(): return [nn.Linear(4, 8), nn.Linear(8, 2)]
    def module_list(): return nn.ModuleList(listed())
    def pairs(): return [("first", nn.Linear(4, 8)), ("second", nn.Linear(8, 2))]
    def ordered(): return collections.OrderedDict(pairs())
    def specs(): return [LayerSpec("a", lambda: nn.Linear(4, 8)), LayerSpec("b", nn.ReLU)]
    def shared():
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        return [("first", first), ("mid", nn.Tanh()), ("last", last)]
    def twice():
        block = nn.Linear(4, 4)
        return nn.Sequential(block, nn.Tanh(), block)
    def twice_with_buffers():
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(norm, norm)
    def empty(): return []
    def nothing(): nn.Sequential(nn.Linear(4, 2))
    def one_module(): return nn.Linear(4, 2)
    def text(): return "layers"
    def not_modules(): return [nn.Linear(4, 2), 3]
    def same_names(): return [("a", nn.Linear(4, 2)), ("a", nn.Linear(2, 2))]
    def raises(): raise RuntimeError("no such size")
    def needs(width, depth): return nn.Sequential(nn.Linear(width, depth))

    def sum_loss(output, labels): return (output - labels["y"]).square().sum()
    def mean_loss(output, labels): return nn.functional.cross_entropy(output, labels["labels"])
    def vector_loss(output, labels): return output.sum(dim=1)
    def float_loss(output, labels): return 0.5
    def failing_loss(output, labels): return output @ output
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usermodel.py").write_text(dedent(MODULE))
    (tmp_path / "needy.py").write_text("import no_such_library\n")
    (tmp_path / "brokenmodel.py").write_text("1 / 0\n")
    # A copy of the search path, so that what loading appends is undone.
    monkeypatch.syspath_prepend(tmp_path)


def load(target: str | None, loss: LossConfig | None = None, **args: object) -> ModelSpec:
    config = Config(model=ModelConfig(target=target, args=args), loss=loss or LossConfig())
    return load_model(config)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("sequential", ("0", "1", "2")),
        ("listed", ("0", "1")),
        ("module_list", ("0", "1")),
        ("pairs", ("first", "second")),
        ("ordered", ("first", "second")),
        ("specs", ("a", "b")),
    ],
)
def test_whatever_lists_layers_is_a_model(function: str, names: tuple[str, ...]) -> None:
    model = load(f"usermodel:{function}")
    assert model.names == names
    x = torch.ones(3, 4)
    for layer in build_layers(model, 0, len(names), seed=0).values():
        x = layer(x)
    assert x.shape[0] == 3


def test_a_model_of_four_lines_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine_in_cwd.py").write_text(
        dedent("""\
            from torch import nn

            def build(width):
                return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        """)
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    model = load("mine_in_cwd:build", width=16)
    assert build_layers(model, 0, 1, seed=0)["0"].get_parameter("weight").shape == (16, 4)


def test_weights_built_whole_depend_on_the_seed_only() -> None:
    def weights(seed: int) -> torch.Tensor:
        config = Config(
            model=ModelConfig(target="usermodel:sequential"), train=TrainConfig(seed=seed)
        )
        torch.rand(seed + 1)
        return build_layers(load_model(config), 2, 3, seed=seed)["2"].get_parameter("weight")

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_layers_built_twice_share_nothing() -> None:
    model = load("usermodel:sequential")
    first, second = (
        build_layers(model, 0, 1, seed=0)["0"].get_parameter("weight") for _ in range(2)
    )
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_shared_parameters_become_ties() -> None:
    assert ties(load("usermodel:shared")) == [(0, 2, "weight", "weight")]
    assert ties(load("usermodel:twice")) == [(0, 2, "weight", "weight"), (0, 2, "bias", "bias")]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("usermodel", "is not of the form package.module:function"),
        ("usermodel:", "is not of the form package.module:function"),
        ("no_such_package.nets:build", "there is no module 'no_such_package'"),
        ("usermodel.nets:build", "'usermodel.nets:build' does not import"),
        ("needy:build", "'needy' needs module 'no_such_library', which is not installed"),
        ("brokenmodel:build", "does not import: ZeroDivisionError: division by zero"),
        ("usermodel:sequentail", r"has no 'sequentail' \(nearest: sequential\)"),
        ("usermodel:number", "is int, which cannot be called"),
        ("usermodel:empty", "usermodel:empty returned no layers"),
        ("usermodel:nothing", "returned no layers but None. Does it lack a return statement"),
        ("usermodel:one_module", "returned one Linear, not layers. It cannot be cut"),
        ("usermodel:text", "returned one str, not layers. Return an nn.Sequential"),
        ("usermodel:not_modules", "returned int as layer '1', not a torch module"),
        ("usermodel:same_names", "Two layers are named 'a'"),
        ("usermodel:raises", "failed: RuntimeError: no such size"),
        ("usermodel:needs", "needs the argument 'width'. Set model.args.width"),
        ("usermodel:twice_with_buffers", "layers '0' and '1' share buffer 'running_mean'"),
    ],
)
def test_a_bad_target_is_explained(target: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(target)


def test_unknown_arguments_are_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"takes no argument 'widht' \(nearest: width\)"):
        load("usermodel:sequential", widht=5)
    with pytest.raises(ModelError, match=r"Model 'gpt' takes no argument 'n_heads'"):
        load(None, vocab_size=5, n_heads=5)
    with pytest.raises(ModelError, match="Model 'gpt' needs the argument 'vocab_size'"):
        load(None)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no model 'gpt2' \(nearest: gpt\)"):
        load_model(Config(model=ModelConfig(name="gpt2")))


def test_every_shipped_model_loads() -> None:
    args: dict[str, dict[str, object]] = {
        "gpt": {"vocab_size": 8},
        "vit": {"num_classes": 3},
        "mlp": {"input_dim": 4, "output_dim": 2},
        "multimodal": {"vocab_size": 8},
        "emulated": {},
        "hf": {"config": {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64}},
    }
    assert args.keys() == SHIPPED.keys()
    for name, given in args.items():
        assert len(load_model(Config(model=ModelConfig(name=name, args=given))).layers) > 1


def test_arguments_that_follow_from_the_rest_of_the_configuration() -> None:
    config = Config(
        model=ModelConfig(name="gpt", args={"vocab_size": 8}), data=DataConfig(sequence_length=77)
    )
    assert load_model(config).max_positions == 77
    config = Config(
        model=ModelConfig(name="emulated", args={"activation_bytes": 4096}),
        pipeline=PipelineConfig(microbatch_size=2),
    )
    layer = build_layers(load_model(config), 0, 1, seed=0)["layers.0"]
    assert layer(torch.ones(2, 1)).numel() * 4 == 4096


def test_columns_of_the_data_feed_model_and_loss() -> None:
    config = Config(
        model=ModelConfig(target="usermodel:listed"),
        loss=LossConfig(target="usermodel:sum_loss"),
        data=DataConfig(format="columns", input_columns=["x"], label_columns=["y"]),
    )
    model = load_model(config)
    batch = {"x": torch.ones(2, 4), "y": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    assert first_input(model, batch) is batch["x"]
    assert model.loss(torch.zeros(2, 2), batch).item() == 30.0
    with pytest.raises(ModelError, match=r"needs field 'y'; the microbatch has \['x'\]"):
        model.loss(torch.zeros(2, 2), {"x": batch["x"]})


def test_a_mean_becomes_a_sum_over_valid_items() -> None:
    loss = load("usermodel:listed", LossConfig(target="usermodel:mean_loss", reduction="mean")).loss
    logits = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, -100, 2, 1, -100])
    expected = nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss(logits, {"labels": labels}), expected, rtol=1e-14, atol=0)


def test_a_mean_over_nothing_is_zero_with_zero_gradients() -> None:
    loss = load("usermodel:listed", LossConfig(target="usermodel:mean_loss", reduction="mean")).loss
    logits = torch.randn(2, 3, requires_grad=True)
    value = loss(logits, {"labels": torch.tensor([-100, -100])})
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (LossConfig(target="usermodel:sum_los"), r"loss.target .* \(nearest: sum_loss\)"),
        (LossConfig(target="nowhere_at_all:f"), "loss.target 'nowhere_at_all:f' does not import"),
        (LossConfig(reduction="median"), "loss.reduction is 'median'"),
    ],
)
def test_a_bad_loss_is_explained_when_loaded(loss: LossConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load("usermodel:listed", loss)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("vector_loss", r"returned \(2,\), not one number. Return the sum"),
        ("float_loss", "returned float, not one number"),
        ("failing_loss", "Loss usermodel:failing_loss failed: RuntimeError"),
    ],
)
def test_a_bad_loss_is_explained_when_called(function: str, message: str) -> None:
    loss = load("usermodel:listed", LossConfig(target=f"usermodel:{function}")).loss
    with pytest.raises(ModelError, match=message):
        loss(torch.ones(2, 3), {"labels": torch.ones(2)})


def test_booleans_and_floats_count_by_the_sample_as_the_loader_counts() -> None:
    """`data/columns.py` counts entries of integer labels only."""
    classes = torch.tensor([[1, -100, 0], [-100, 2, 3]])
    assert count_valid({"labels": classes}) == 4
    assert count_valid({"labels": torch.ones(2, 3)}) == 2
    flags = torch.tensor([[True, False, True], [False, False, True]])
    assert count_valid({"labels": flags}) == 2
    off = default_loss(torch.zeros(2, 3), {"labels": flags})
    assert off.item() == pytest.approx(2 / 3 + 1 / 3)
