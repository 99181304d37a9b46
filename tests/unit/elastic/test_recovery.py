"""Where training goes on, and whence each layer comes: against a slow and simple search."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.elastic.instructions import INITIAL, STORAGE
from elastic_trainer.elastic.recovery import recovery_point
from elastic_trainer.testing.simulated_worker import even_cut

LAYERS = [f"layer{i}" for i in range(4)]
NODES = {"a": "n1", "b": "n1", "c": "n2", "d": "n2"}
PLAN = even_cut(7, ("a", "b"), layers=4, step_s=1.0)  # a: 0 and 1, b: 2 and 3
FIRST, SECOND = LAYERS[:2], LAYERS[2:]


def test_nothing_moves_when_the_owners_hold_it() -> None:
    point = recovery_point(
        PLAN, {"a": {5: LAYERS}, "b": {5: LAYERS}, "c": {5: LAYERS}}, NODES, saved=2, newest=5
    )
    assert point.update == 5 and point.from_memory
    assert point.sources == {"layer0": "a", "layer1": "a", "layer2": "b", "layer3": "b"}


def test_a_worker_on_the_owner_s_node_comes_before_others() -> None:
    copies = {"d": {5: FIRST}, "b": {5: FIRST}, "c": {5: SECOND}}
    point = recovery_point(PLAN, copies, NODES, saved=0, newest=5)
    assert point.sources == {"layer0": "b", "layer1": "b", "layer2": "c", "layer3": "c"}


def test_several_holders_share_the_load() -> None:
    copies = {"c": {5: LAYERS}, "d": {5: LAYERS}}
    sources = recovery_point(PLAN, copies, NODES, saved=0, newest=5).sources
    assert sorted(sources.values()) == ["c", "c", "d", "d"]


def test_the_newest_update_that_is_whole_counts_and_not_the_newest_there_is() -> None:
    copies = {"a": {5: FIRST, 8: FIRST}, "b": {5: SECOND, 6: SECOND}}
    assert recovery_point(PLAN, copies, NODES, saved=0, newest=8).update == 5


def test_what_was_not_committed_is_not_used() -> None:
    copies = {"a": {4: FIRST, 6: FIRST}, "b": {4: SECOND, 6: SECOND}}
    assert recovery_point(PLAN, copies, NODES, saved=0, newest=5).update == 4


def test_a_newer_checkpoint_wins_and_serves_only_what_nobody_holds() -> None:
    copies = {"a": {4: LAYERS, 6: FIRST}}
    point = recovery_point(PLAN, copies, NODES, saved=6, newest=6)
    assert point.update == 6 and not point.from_memory
    assert point.sources == {
        "layer0": "a",
        "layer1": "a",
        "layer2": STORAGE,
        "layer3": STORAGE,
    }


def test_without_any_copy_the_run_starts_anew() -> None:
    point = recovery_point(PLAN, {"a": {3: FIRST}}, NODES, saved=0, newest=3)
    assert point.update == 0 and set(point.sources.values()) == {INITIAL}


def test_unknown_nodes_are_not_the_same_node() -> None:
    copies = {"c": {5: LAYERS}, "d": {5: LAYERS}}
    sources = recovery_point(PLAN, copies, {"a": "", "b": "", "c": ""}, saved=0, newest=5).sources
    assert sorted(sources.values()) == ["c", "c", "d", "d"]


@given(
    copies=st.dictionaries(
        st.sampled_from("abcd"),
        st.dictionaries(
            st.integers(0, 6), st.lists(st.sampled_from(LAYERS), unique=True), max_size=3
        ),
    ),
    saved=st.integers(0, 6),
    newest=st.integers(0, 6),
)
def test_it_is_the_best_there_is_and_each_source_holds_it(
    copies: dict[str, dict[int, list[str]]], saved: int, newest: int
) -> None:
    saved = min(saved, newest)
    point = recovery_point(PLAN, copies, NODES, saved=saved, newest=newest)

    def can_restore(update: int) -> bool:
        if update in (0, saved):
            return True
        return all(any(name in c.get(update, ()) for c in copies.values()) for name in LAYERS)

    assert point.update == max(u for u in range(newest + 1) if can_restore(u))
    assert list(point.sources) == LAYERS
    for layer, source in point.sources.items():
        holders = [w for w, c in copies.items() if layer in c.get(point.update, ())]
        owner = "a" if layer in FIRST else "b"
        if source in (STORAGE, INITIAL):
            assert not holders and point.update == (saved if source == STORAGE else 0)
        else:
            assert source in holders and (source == owner or owner not in holders)
