"""Costs of samples: predictions, shares of stages, and corrections."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.planner.sample_costs import (
    Adaptive,
    CostModel,
    GroupCost,
    analytic_cost,
    deciding_stages,
    even_stages,
    group_of,
    of_stages,
    shares_of,
)
from elastic_trainer.planner.sizes import ItemSize

MODEL = CostModel((GroupCost("vision", 2.0, 3.0), GroupCost("language", linear_s=0.5)))


def predict(model: CostModel, size: ItemSize) -> list[float]:
    """Seconds that one sample costs each group."""
    (row,) = model.predict_all([size]).tolist()
    return list(row)


def test_each_sequence_counts_by_itself() -> None:
    size = ItemSize((4, 8), (), 10)
    assert predict(MODEL, size) == [2.0 * 12 + 3.0 * (16 + 64), 0.5 * (1 + 2 + 10)]
    assert predict(MODEL, ItemSize((), (), 1))[0] == 0
    sizes = [size, ItemSize((), (7,), 1)]
    np.testing.assert_array_equal(MODEL.predict_all(sizes), [predict(MODEL, s) for s in sizes])
    assert MODEL.predict_all([]).shape == (0, 2)


def test_groups_see_their_own_lengths() -> None:
    cost = analytic_cost(dim=8, vocab_size=100)
    by_group = dict(
        zip([g.group for g in cost.groups], predict(cost, ItemSize((), (), 5)), strict=True)
    )
    assert by_group["vision"] == by_group["audio"] == 0
    assert by_group["head"] == pytest.approx(3e-12 * 2 * 8 * 100 * 5)
    assert by_group["language"] == pytest.approx(3e-12 * 4 * (24 * 64 * 5 + 4 * 8 * 25))
    heard = predict(cost, ItemSize((), (9,), 0))  # nine frames are three tokens
    assert heard[1] == cost.groups[1].seconds([3]) > 0
    frozen = analytic_cost(dim=8, vocab_size=100, freeze=["vision"])
    seen = ItemSize((16,), (), 1)
    assert predict(cost, seen)[0] == pytest.approx(3 * predict(frozen, seen)[0])
    assert predict(cost, seen)[1:] == predict(frozen, seen)[1:]


@given(
    st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_even_stages_share_everything_evenly(totals: list[float], num_stages: int) -> None:
    shares = np.array(even_stages(totals, num_stages))
    whole = sum(totals)
    assert (shares >= 0).all()
    if whole > 1e-6:
        loads = shares @ np.array(totals)
        np.testing.assert_allclose(loads, whole / num_stages, rtol=1e-6)
        for group, total in enumerate(totals):
            if total > 1e-6 * whole:
                assert shares[:, group].sum() == pytest.approx(1, rel=1e-5)


def test_stages_hold_neighbours() -> None:
    assert even_stages([2.0, 1.0, 1.0], 2) == ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))
    assert even_stages([0.0, 0.0], 3) == ((1.0, 1.0),)
    shares = even_stages([3.5, 4.0, 0.5], 4)
    assert len(deciding_stages(shares)) == 3  # the third group has no stage of its own
    assert deciding_stages(even_stages([3.0, 5.0], 4)) == ((2 / 3, 0.0), (0.0, 0.4))
    costs = of_stages(np.array([[2.0, 4.0]]), ((1.0, 0.25), (0.0, 0.75)))
    np.testing.assert_array_equal(costs, [[3.0, 3.0]])


def test_corrections_follow_what_is_observed_and_are_bounded() -> None:
    adaptive = Adaptive(MODEL)
    assert adaptive.factors() == (1.0, 1.0)
    for _ in range(40):
        adaptive.observe("vision", 2.0, 6.0)
    assert adaptive.factor("vision") == pytest.approx(3)
    assert adaptive.factor("language") == pytest.approx(3)  # the machine may be slow at all
    adaptive.observe("language", 1.0, 1.0)
    assert adaptive.factors() == pytest.approx((3, 1))
    before = adaptive.factor("vision")
    adaptive.observe("vision", 1.0, 1e9)
    assert before < adaptive.factor("vision") < before * 16
    known = adaptive.factors()
    adaptive.observe("vision", 0.0, 5.0)
    adaptive.observe("vision", 5.0, 0.0)
    assert adaptive.factors() == known


def test_rates_are_shares_as_slow_as_their_groups() -> None:
    adaptive = Adaptive(MODEL)
    shares = ((0.5, 0.0), (0.5, 1.0))
    assert adaptive.rates(shares) == shares
    adaptive.observe("vision", 1.0, 3.0)
    adaptive.observe("language", 1.0, 0.5)
    np.testing.assert_allclose(adaptive.rates(shares), [[1.5, 0.0], [1.5, 0.5]])


def test_shares_of_a_plan() -> None:
    layers = [
        ("vision.embed", 1.0),
        ("vision.blocks.0", 3.0),
        ("lm.blocks.0", 2.0),
        ("lm.head", 5.0),
    ]
    assert [group_of(name) for name, _ in layers] == ["vision", "vision", "language", "head"]
    assert group_of("layers.3") is None
    grouped = [(str(group_of(name)), seconds) for name, seconds in layers]
    shares = shares_of(grouped, [(0, 1), (1, 4)], ["vision", "audio", "language", "head"])
    assert shares == ((0.25, 0.0, 0.0, 0.0), (0.75, 0.0, 1.0, 1.0))


@pytest.mark.parametrize("machine", [1.0, 40.0])
def test_stages_teach_the_proportions_of_groups(machine: float) -> None:
    adaptive = Adaptive(MODEL)
    true, predicted = np.array([2.0, 0.5]), np.array([4.0, 8.0])
    shares = ((0.5, 0.0), (0.5, 0.25), (0.0, 0.75))
    for _ in range(100):
        adaptive.observe_stages(
            predicted.tolist(), shares, machine * (np.array(shares) @ (predicted * true))
        )
    learnt = adaptive.factor("vision") / adaptive.factor("language")
    assert learnt == pytest.approx(4, rel=0.02)
    pure = Adaptive(MODEL)
    pure.observe_stages(predicted.tolist(), ((1.0, 0.0), (0.0, 1.0)), machine * predicted * true)
    assert pure.factor("vision") / pure.factor("language") == pytest.approx(4)
    before = pure.factors()
    pure.observe_stages([0.0, 0.0], ((1.0, 0.0), (0.0, 1.0)), [0.0, 0.0])
    assert pure.factors() == before
