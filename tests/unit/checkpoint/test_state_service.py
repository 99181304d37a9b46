"""State between workers over real sockets: fetches, snapshots, and who is refused."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_trainer.checkpoint.state_service import StateService
from elastic_trainer.errors import FencedError, StallError, TransportError
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.zmq_channel import ZmqChannel

WAIT_S = 20.0
FACTS = {"scaler": {"scale": 0.1, "num_good": 3}}


def state(seed: int) -> dict[str, Tensor]:
    """One layer's state: all sorts of tensors that optimizers and layers keep."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "param/w": torch.randn(5, 7, generator=generator),
        "param/half": torch.randn(3, generator=generator).bfloat16(),
        "buffer/count": torch.tensor(seed, dtype=torch.int64),
        "optim/w/step": torch.tensor(float(seed)),
        "optim/w/exp_avg": torch.randn(7, 5, generator=generator).t(),
        "buffer/none": torch.empty(0, 4),
    }


def same(got: Any, want: dict[str, Tensor]) -> bool:
    assert list(got) == list(want)
    pairs = zip(got.values(), want.values(), strict=True)
    return all(g.dtype == w.dtype and torch.equal(g, w) for g, w in pairs)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Workers:
    """Three services of one process; `tcp`: as if each were on a host of its own."""

    def __init__(self, tcp: bool) -> None:
        self.tcp = tcp
        self.channels = {name: ZmqChannel(name) for name in "abc"}
        self.services = {n: StateService(n, c, WAIT_S) for n, c in self.channels.items()}

    def addresses(self, but: str) -> dict[str, dict[str, Any]]:
        found = {n: c.address() for n, c in self.channels.items() if n != but}
        return {n: {**a, "host": n} for n, a in found.items()} if self.tcp else found

    def enter(self, generation: int, *names: str) -> None:
        for name in names or "abc":
            self.services[name].enter(generation, self.addresses(name))

    def close(self) -> None:
        for service in self.services.values():
            service.close()


@pytest.fixture(params=["ipc", "tcp"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.param == "tcp")
    yield made
    made.close()


def test_layers_come_from_where_they_are_said_to_be(workers: Workers) -> None:
    workers.enter(3)
    a, b, c = (workers.services[name] for name in "abc")
    b.offer(7, {"x": state(1), "y": state(2)}, FACTS)
    c.snapshot(7, {"z": state(3)}, FACTS)
    got = a.fetch(7, {"x": "b", "y": "b", "z": "c"})
    assert same(got["x"].found.state, state(1)) and not got["x"].is_copy
    assert same(got["y"].found.state, state(2)) and got["y"].found.facts == FACTS
    assert same(got["z"].found.state, state(3)) and got["z"].is_copy
    assert b.stock() == {7: ["x", "y"]} and c.stock() == {7: ["z"]} and a.stock() == {}


def test_what_a_worker_does_not_hold_is_an_error_at_once(workers: Workers) -> None:
    workers.enter(1)
    a, b = workers.services["a"], workers.services["b"]
    b.offer(7, {"x": state(1)}, {})
    for update, layer in ((6, "x"), (7, "y")):
        with pytest.raises(TransportError, match=f"b does not hold layer '{layer}' after"):
            a.fetch(update, {layer: "b"})


def test_live_state_is_not_given_away_once_training_goes_on(workers: Workers) -> None:
    workers.enter(1)
    a, b = workers.services["a"], workers.services["b"]
    b.offer(7, {"x": state(1)}, {})
    assert a.fetch(7, {"x": "b"})
    b.withdraw()
    assert b.stock() == {}
    with pytest.raises(TransportError, match="b does not hold layer 'x' after update 7"):
        a.fetch(7, {"x": "b"})


def test_nothing_changes_live_state_while_it_is_read(workers: Workers) -> None:
    workers.enter(1)
    a, b = workers.services["a"], workers.services["b"]
    value = torch.zeros(1 << 18)
    problems: list[str] = []
    ended = threading.Event()

    def train() -> None:
        for update in range(1, 400):
            b.offer(0, {"x": {"param/w": value}}, {})
            b.withdraw()
            value.fill_(update)
        b.offer(0, {"x": {"param/w": value}}, {})
        ended.set()

    threading.Thread(target=train, daemon=True).start()
    while not ended.is_set():
        try:
            got = a.fetch(0, {"x": "b"})["x"].found.state["param/w"]
        except TransportError:
            continue
        if got.min() != got.max():
            problems.append(f"{got.min()} to {got.max()}")
    assert not problems


def test_a_buddy_holds_a_snapshot_whole_before_it_says_so(workers: Workers) -> None:
    workers.enter(1)
    a, b, c = (workers.services[name] for name in "abc")
    a.restored(0, "b")
    live = {f"layer{i}": state(i) for i in range(20)}
    a.snapshot(10, live, FACTS)
    for tensors in live.values():
        tensors["param/w"].fill_(-1)  # training goes on
    eventually(lambda: a.acknowledged == 10)
    assert set(b.stock()[10]) == set(live)
    got = c.fetch(10, dict.fromkeys(live, "b"))
    assert all(same(got[f"layer{i}"].found.state, state(i)) for i in range(20))
    assert same(a.copies.find(10, "layer3").state, state(3))  # type: ignore[union-attr]
    assert got["layer3"].found.facts == FACTS


def test_a_snapshot_tells_what_moving_the_one_before_has_taken(workers: Workers) -> None:
    """Of the sender's processor and of the buddy's; each time is told once."""
    workers.enter(1)
    a, b = workers.services["a"], workers.services["b"]
    a.restored(0, "b")
    large = {f"layer{i}": {"param/w": torch.zeros(1 << 21)} for i in range(8)}
    small = {"layer0": {"param/w": torch.zeros(1)}}
    assert a.snapshot(10, large, FACTS)[0] > 0.001, "and were copied first"
    eventually(lambda: a.acknowledged == 10)
    told = {name: service.snapshot(11, small, FACTS) for name, service in (("a", a), ("b", b))}
    again = {name: service.snapshot(12, small, FACTS) for name, service in (("a", a), ("b", b))}
    for name in "ab":
        assert told[name][1] > 0.001, "64 MiB were moved"
        assert again[name][1] < told[name][1] / 2


def test_a_part_of_a_snapshot_is_never_acknowledged_nor_offered(workers: Workers) -> None:
    workers.enter(1, "b", "c")
    b = workers.services["b"]
    channel = workers.channels["a"]  # whose service stands still: it has not entered
    channel.advance(1)
    channel.connect("b", workers.addresses("a")["b"])
    part = {"layers": ["x", "y"], "layer": "x", "keys": ["param/w"], "facts": {}}
    channel.send("b", Tag(1, "S", 5, 0), Message([torch.ones(2)], part))
    channel.send("b", Tag(1, "S", 6, 0), Message([torch.ones(2)], {**part, "layers": ["x"]}))
    eventually(lambda: bool(b.stock()))
    assert b.stock() == {6: ["x"]}
    channel.send("b", Tag(1, "S", 5, 1), Message([torch.ones(2)], {**part, "layer": "y"}))
    channel.send("b", Tag(1, "S", 7, 0), Message([torch.ones(2)], {**part, "layers": ["x"]}))
    eventually(lambda: 7 in b.stock())
    assert sorted(b.stock()) == [6, 7]


def test_without_a_buddy_the_own_copy_counts(workers: Workers) -> None:
    workers.enter(1)
    a = workers.services["a"]
    assert a.acknowledged == -1
    a.snapshot(4, {"x": state(1)}, {})
    assert a.acknowledged == 4 and a.stock() == {4: ["x"]}


def test_a_worker_that_was_cut_off_gives_and_gets_nothing(workers: Workers) -> None:
    workers.enter(1)
    a, b, c = (workers.services[name] for name in "abc")
    for service in (a, b, c):
        service.restored(0, {"a": "b", "b": "c", "c": "a"}[service.worker])
    b.snapshot(10, {"y": state(2)}, {})
    eventually(lambda: b.acknowledged == 10)
    # a does not hear of generation 2.
    del workers.channels["a"]
    workers.enter(2, "b", "c")
    a.snapshot(10, {"x": state(1)}, {})
    c.offer(10, {"z": state(3)}, {})
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(a.fetch, 10, {"y": "b"})
        assert same(b.fetch(10, {"z": "c"})["z"].found.state, state(3))
        a.interrupt(FencedError("it is over"))
        with pytest.raises(FencedError, match="it is over"):
            asked.result(WAIT_S)
    assert a.acknowledged == -1
    assert b.stock() == {10: ["y"]} and sorted(c.stock()[10]) == ["y", "z"]
    with pytest.raises(TransportError, match="not connected to a"):
        b.fetch(10, {"x": "a"})


def test_updates_that_were_abandoned_are_forgotten(workers: Workers) -> None:
    workers.enter(1)
    a, b, _ = (workers.services[name] for name in "abc")
    a.restored(0, "b")
    for update in (10, 20):
        a.snapshot(update, {"x": state(update)}, {})
        eventually(lambda: a.acknowledged == update)  # noqa: B023
    workers.enter(2)
    assert a.acknowledged == -1
    for service in (a, b):
        service.restored(10, "b" if service is a else None)
        assert service.stock() == {10: ["x"]}


def test_word_of_what_is_stored_counts_in_its_generation_only(workers: Workers) -> None:
    workers.enter(2)
    a = workers.services["a"]
    for update in (10, 20):
        a.snapshot(update, {"x": state(update)}, {})
    a.progress(1, 20, 20)
    assert sorted(a.stock()) == [10, 20]
    a.progress(2, 20, 20)
    assert sorted(a.stock()) == [20]


def test_a_question_may_come_before_its_asker_is_known(workers: Workers) -> None:
    workers.enter(1, "a")
    a, b = workers.services["a"], workers.services["b"]
    b.enter(1, {})
    b.offer(1, {"x": state(1)}, {})
    if workers.tcp:  # nobody gets in who was not announced; within a host the folder is the guard
        return
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(a.fetch, 1, {"x": "b"})
        eventually(lambda: len(b._parked) == 1)
        b.enter(1, workers.addresses("b"))
        assert same(asked.result(WAIT_S)["x"].found.state, state(1))


def test_a_wait_for_state_has_a_limit() -> None:
    workers = Workers(tcp=False)
    impatient = ZmqChannel("d")
    d = StateService("d", impatient, 0.2)
    b = workers.services["b"]
    try:
        d.enter(1, workers.addresses("d"))
        b.enter(0, {})  # does not know of generation 1 yet
        begin = time.monotonic()
        with pytest.raises(StallError, match="d waited 0.2 s for the state of layer 'x' from b"):
            d.fetch(1, {"x": "b"})
        assert time.monotonic() - begin < 2.0
    finally:
        d.close()
        workers.close()


@pytest.mark.parametrize("end", ["interrupt", "close", "enter"])
def test_a_waiting_fetch_is_woken_at_once(end: str) -> None:
    workers = Workers(tcp=False)
    workers.enter(1, "a")
    a = workers.services["a"]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(a.fetch, 1, {"x": "b"})
        eventually(lambda: bool(a._answers))
        begin = time.monotonic()
        if end == "interrupt":
            a.interrupt(FencedError("over"))
        elif end == "enter":
            a.enter(2, {})
        else:
            a.close()
        with pytest.raises(TransportError):
            asked.result(WAIT_S)
        assert time.monotonic() - begin < 1.0
    workers.close()


def test_a_peer_that_sends_nonsense_does_not_end_the_service(workers: Workers) -> None:
    workers.enter(1, "b", "c")
    b, c = workers.services["b"], workers.services["c"]
    channel = workers.channels["a"]
    channel.advance(1)
    channel.connect("b", workers.addresses("a")["b"])
    good = {"layers": ["x"], "layer": "x", "keys": ["param/w"], "facts": {}}
    worse: list[dict[str, Any]] = [{"layers": 3}, {"layer": "y"}, {"keys": [1]}, {"keys": []}]
    for bad in [*worse, {"facts": None}]:
        channel.send("b", Tag(1, "S", 5, 0), Message([torch.ones(2)], {**good, **bad}))
    channel.send("b", Tag(1, "?", 5, 0), Message([]))
    channel.send("b", Tag(1, "Q", 5, 0), Message([], {"layer": {}}))
    b.offer(5, {"x": state(1)}, {})
    assert same(c.fetch(5, {"x": "b"})["x"].found.state, state(1))
    assert b.copies.stock() == {}


def test_few_layers_are_under_way_at_once(workers: Workers) -> None:
    workers.enter(1, "a")
    a, b = workers.services["a"], workers.services["b"]
    layers = {f"layer{i}": state(i) for i in range(30)}
    b.offer(1, layers, {})
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(a.fetch, 1, dict.fromkeys(layers, "b"))
        eventually(lambda: bool(a._answers))
        with pytest.raises(FutureTimeout):
            asked.result(0.1)
        assert len(a._answers) == 4, "the rest waits, so as not to fill the memory of b"
        workers.enter(1, "b")
        got = asked.result(WAIT_S)
    assert all(same(got[name].found.state, want) for name, want in layers.items())


def test_word_of_progress_does_not_wait_for_a_large_layer(workers: Workers) -> None:
    workers.enter(1)
    a = workers.services["a"]
    a.snapshot(10, {"x": state(1)}, {})
    a.snapshot(20, {"x": state(1)}, {})
    with a._lock, ThreadPoolExecutor() as pool:  # as while live state is read
        pool.submit(a.progress, 1, 20, 20).result(WAIT_S)
    assert sorted(a.stock()) == [10, 20]
    a.progress(1, 20, 20)
    assert sorted(a.stock()) == [20]
