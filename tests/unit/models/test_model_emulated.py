"""Emulated layers: time exact in the sum, gradients true, sizes as the profile says."""

import time

import pytest
import torch

from elastic_trainer.errors import ModelError
from elastic_trainer.models import emulated as module
from elastic_trainer.models.emulated import MAX_DEBT_S, Pacer, emulated
from elastic_trainer.models.layers import build_layers


class LateClock:
    """A clock that only sleeping moves, and that wakes the sleeper late."""

    def __init__(self, late_s: float) -> None:
        self.time = 100.0
        self.late_s = late_s
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.slept.append(duration_s)
        self.time += duration_s + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LateClock:
    clock = LateClock(late_s=0.001)
    monkeypatch.setattr(module, "PACER", Pacer(clock.now, clock.sleep))
    return clock


def test_oversleep_does_not_add_up() -> None:
    clock = LateClock(late_s=0.002)
    pacer = Pacer(clock.now, clock.sleep)
    for _ in range(1000):
        pacer.wait(0.01, since=clock.now())
    # Late once, whatever the number of sleeps.
    assert clock.time - 100.0 == pytest.approx(1000 * 0.01 + 0.002, abs=1e-6)


def test_work_done_before_the_sleep_counts() -> None:
    clock = LateClock(late_s=0.0)
    pacer = Pacer(clock.now, clock.sleep)
    started = clock.now()
    clock.time += 0.004
    pacer.wait(0.01, since=started)
    assert clock.slept == [pytest.approx(0.006)]
    pacer.wait(0.0, since=started)
    assert len(clock.slept) == 1


def test_a_long_stop_is_not_made_up_for() -> None:
    clock = LateClock(late_s=10.0)
    pacer = Pacer(clock.now, clock.sleep)
    pacer.wait(0.01, since=clock.now())
    assert pacer.debt_s == MAX_DEBT_S


def test_durations_are_in_proportion_to_samples(clock: LateClock) -> None:
    clock.late_s = 0.0
    model = emulated(
        layers=[{"forward_s": 0.25, "backward_s": 0.5}, {"forward_s": 1.0}],
        backward_s=2.0,
        microbatch_size=4,
    )
    layers = list(build_layers(model, 0, 2, seed=0).values())
    x = torch.ones(4, 3)
    for samples in (4, 1):
        clock.slept.clear()
        y = layers[1](layers[0](x[:samples]))
        model.loss(y, {}).backward()  # type: ignore[no-untyped-call]
        assert clock.slept == pytest.approx([t * samples / 4 for t in (0.25, 1.0, 2.0, 0.5)])


def test_activations_have_the_profiled_size(clock: LateClock) -> None:
    model = emulated(num_layers=1, activation_bytes=65536, microbatch_size=4)
    (layer,) = build_layers(model, 0, 1, seed=0).values()
    assert layer(torch.zeros(4, 16, dtype=torch.int64)).nbytes == 65536
    assert layer(torch.zeros(1, 16, dtype=torch.int64)).nbytes == 65536 // 4
    assert sum(p.numel() for p in layer.parameters()) == 2


def test_gradients_are_those_of_the_formula(clock: LateClock) -> None:
    model = emulated(num_layers=1, activation_bytes=96, microbatch_size=2)
    (layer,) = build_layers(model, 0, 1, seed=0).values()
    layer.double()
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    out = layer(x)
    grads = torch.autograd.grad(out[:, 0].square().sum(), (x, weight, bias))
    plain = torch.tanh(x[:, 0] * weight + bias)
    # Numpy's tanh and torch's may differ in the last bit.
    torch.testing.assert_close(out[:, 0], plain, rtol=1e-12, atol=1e-12)
    assert not out[:, 1:].any()
    expected = torch.autograd.grad(plain.square().sum(), (x, weight, bias))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_training_moves_the_number_towards_its_aim(clock: LateClock) -> None:
    model = emulated(num_layers=3)
    layers = torch.nn.Sequential(*build_layers(model, 0, 3, seed=0).values())
    ids = torch.randint(0, 1000, (4, 8))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = model.loss(layers(ids), {})
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_waiting_takes_time_but_no_processor() -> None:
    model = emulated(num_layers=4, forward_s=0.02, backward_s=0.02)
    layers = torch.nn.Sequential(*build_layers(model, 0, 4, seed=0).values())
    wall, cpu = time.perf_counter(), time.process_time()
    model.loss(layers(torch.zeros(4, 8)), {}).backward()  # type: ignore[no-untyped-call]
    assert time.perf_counter() - wall >= 8 * 0.02 - MAX_DEBT_S
    assert time.process_time() - cpu < 8 * 0.02 / 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"layers": []}, "layers is an empty list"),
        ({"layers": [3]}, "layer 0 is 3, a mapping is needed"),
        ({"layers": [{"forward": 1}]}, r"layer 0 has no cost 'forward' \(nearest: forward_s\)"),
        ({"layers": [{}, {"backward_s": -1}]}, "layer 1: backward_s is -1"),
        ({"forward_s": "fast"}, "forward_s is 'fast', a number of 0 or more"),
        ({"forward_s": float("nan")}, "forward_s is nan"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_bad_profiles_are_refused(args: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        emulated(**args)  # type: ignore[arg-type]


def test_durations_follow_a_field_of_the_microbatch(clock: LateClock) -> None:
    clock.late_s = 0.0
    costs = {"forward_s": 0.25, "backward_s": 0.5}
    model = emulated(layers=[{**costs, "cost_field": "weight"}, costs], microbatch_size=4)
    assert [spec.batch_fields for spec in model.layers] == [("weight",), ()]
    first, second = build_layers(model, 0, 2, seed=0).values()
    x = torch.ones(2, 3)
    y = second(first(x, weight=torch.tensor([3.0, 5.0])))
    model.loss(y, {}).backward()  # type: ignore[no-untyped-call]
    assert clock.slept == pytest.approx([0.5, 0.125, 0.25, 1.0])
    with pytest.raises(ModelError, match="layer 0: cost_field is 3, a name is needed"):
        emulated(layers=[{"cost_field": 3}])
