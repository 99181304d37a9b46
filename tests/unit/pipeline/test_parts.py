"""The small parts: learning rate, norms, the scaler, the ring of versions, feeds."""

import math

import pytest
import torch
from torch import nn

from elastic_trainer.config import OptimConfig
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.pipeline import reduce
from elastic_trainer.pipeline.feed import ChannelFeed, MemoryFeed
from elastic_trainer.pipeline.lr import lr_at
from elastic_trainer.pipeline.optim import build_optimizer, export_state, import_state
from elastic_trainer.pipeline.stash import VersionRing, collect_params
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.in_process import InProcessNetwork


def test_learning_rate() -> None:
    config = OptimConfig(learning_rate=1.0, warmup_steps=4, min_lr_ratio=0.2, lr_schedule="linear")
    assert [lr_at(u, config, 14) for u in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert lr_at(9, config, 14) == pytest.approx(0.6)
    assert lr_at(14, config, 14) == lr_at(99, config, 14) == pytest.approx(0.2)
    cosine = OptimConfig(learning_rate=1.0, min_lr_ratio=0.0, lr_schedule="cosine")
    assert lr_at(5, cosine, 20) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert lr_at(5, cosine, None) == 1.0


def test_optimizers_are_torchs_own() -> None:
    param = nn.Parameter(torch.ones(3))
    adamw = build_optimizer([param], OptimConfig())
    assert isinstance(adamw, torch.optim.AdamW) and adamw.defaults["fused"]
    nadam = build_optimizer([param], OptimConfig(name="nadam"))
    assert isinstance(nadam, torch.optim.NAdam) and nadam.defaults["decoupled_weight_decay"]
    assert build_optimizer([], OptimConfig()) is None
    with pytest.raises(ConfigError, match="adamw, sgd or nadam"):
        build_optimizer([param], OptimConfig(name="lion"))


def test_optimizer_state_moves() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    source, target = (build_optimizer([p], OptimConfig(name="nadam")) for p in params)
    assert source is not None and target is not None
    assert export_state(source, params[0]) == {}
    params[0].grad = torch.tensor([1.0, 2.0, 3.0])
    source.step()
    params[1].data.copy_(params[0].data)
    import_state(target, params[1], export_state(source, params[0]))
    for param in params:
        param.grad = torch.tensor([3.0, 1.0, 1.0])
    source.step()
    target.step()
    assert torch.equal(params[0], params[1])


def test_norms_do_not_depend_on_the_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [10.0 ** (i % 7) * v for i, v in enumerate(torch.rand(64, generator=generator))]
    values = [float(v) for v in values]
    whole = reduce.combine([reduce.Norms(values, 0)])
    for cut in range(64):
        parts = [reduce.Norms(values[cut:], 1), reduce.Norms(values[:cut], 0)]
        assert reduce.combine(parts) == whole


def test_the_stage_nearest_the_loss_is_blamed() -> None:
    inf = float("inf")
    parts = [reduce.Norms([inf], s, f"layer{s}") for s in (0, 1)] + [reduce.Norms([1.0], 2)]
    total = reduce.combine(parts)
    assert (total.bad_stage, total.bad_layer) == (1, "layer1")
    message = reduce.total_to_message(total)
    assert reduce.total_from_message(message) == total


def test_clip_factor() -> None:
    assert reduce.clip_factor(0.5, 1.0) == 1.0
    assert reduce.clip_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert reduce.clip_factor(4.0, 0.0) == 1.0


def test_scaler() -> None:
    scaler = reduce.LossScaler()
    scaler.update(True)
    assert scaler.state() == {"scale": 32768.0, "num_good": 0}
    for _ in range(reduce.LossScaler.GROWTH_INTERVAL):
        scaler.update(False)
    assert scaler.state() == {"scale": 65536.0, "num_good": 0}


def test_ring_keeps_what_is_needed_and_no_more() -> None:
    layer = nn.Linear(2, 2)
    params = collect_params({"a": layer})
    ring = VersionRing(params, [], delay=2)
    for version in range(5):
        assert ring.install_newest() == version
        assert torch.all(layer.bias == version) or version == 0
        ring.take_gradients(max(0, version - 2))
        ring.open_next()
        with torch.no_grad():
            ring.handles[1].fill_(version + 1)
        ring.close_next()
    assert (ring.depth, ring.copies, ring.newest) == (3, 5, 5)
    ring.install(3)
    assert torch.all(layer.bias == 3)
    with pytest.raises(AssertionError, match="is gone"):
        ring.install(2)
    ring.begin()
    assert ring.newest == 0 and torch.all(layer.bias == 5)


def test_overwriting_a_version_in_use_is_noticed() -> None:
    """Autograd guards the ring: a backward on weights that were replaced does not pass."""
    layer = nn.Linear(2, 2)
    ring = VersionRing(collect_params({"a": layer}), [], delay=1)
    ring.install_newest()
    output = layer(torch.ones(1, 2, requires_grad=True)).sum()
    for _ in range(2):
        ring.take_gradients(ring.newest)
        ring.open_next()
        ring.close_next()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_modules_that_keep_a_second_list_see_new_versions() -> None:
    lstm = nn.LSTM(2, 2)
    params = collect_params({"a": lstm})
    fresh = nn.Parameter(torch.zeros_like(params[0].leaf))
    params[0].install(fresh)
    assert any(weight is fresh for weight in lstm._flat_weights)


def test_shared_parameters_within_a_layer_are_one() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer[1].weight = layer[0].weight
    params = collect_params({"a": layer})
    assert [p.name for p in params] == ["0.weight", "0.bias", "1.bias"]
    params[0].install(nn.Parameter(torch.zeros(2, 2)))
    assert layer[0].weight is layer[1].weight is params[0].leaf


def test_channel_feed() -> None:
    network = InProcessNetwork()
    loader, stage = network.channel("loader-0"), network.channel("stage-0")
    message = Message([torch.arange(3), torch.ones(2)], {"fields": ["x", "labels"]})
    loader.send("stage-0", Tag(0, "D", 5, 1), message)
    fields = ChannelFeed(stage, "loader-0", 0).fetch(5, 1, "train", 1.0)
    assert {name: tensor.tolist() for name, tensor in fields.items()} == {
        "x": [0, 1, 2],
        "labels": [1.0, 1.0],
    }


def test_memory_feed_names_what_is_missing() -> None:
    with pytest.raises(DataError, match="microbatch 3 of update 1"):
        MemoryFeed({1: [{}]}).fetch(1, 3, "train", 1.0)
