"""What every channel promises."""

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_trainer.errors import FencedError, StallError, TransportError, WorkerLostError
from elastic_trainer.transport import tensors
from elastic_trainer.transport.channel import Arrays, Channel, Message, Tag
from elastic_trainer.transport.inbox import BufferedChannel

WAIT_S = 20.0
Pair = tuple[Channel, Channel]


def tag(microbatch: int = 0, generation: int = 0, kind: str = "F", step: int = 1) -> Tag:
    return Tag(generation, kind, step, microbatch)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Arbitrary bits of this type (0 and 1 for bool, where others are not values)."""
    high = 2 if dtype == torch.bool else 256
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(high, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def test_every_dtype_and_kind_of_shape_arrives_bit_for_bit(pair: Pair) -> None:
    a, b = pair
    for i, dtype in enumerate(tensors.TYPES.values()):
        sent = [
            sample(dtype, ()),
            sample(dtype, (0,)),
            sample(dtype, (3, 0, 2)),
            sample(dtype, (7,)),
            sample(dtype, (4, 6)).t(),
            sample(dtype, (4, 6))[1:, ::2],
            sample(dtype, (2,)).expand(5, 2),
        ]
        a.send("b", tag(i), Message(sent, {"fields": ["x", None, 1.5], "flag": True}))
        got = b.recv("a", tag(i), WAIT_S)
        assert got.meta == {"fields": ["x", None, 1.5], "flag": True}
        for want, tensor in zip(sent, got.tensors, strict=True):
            assert tensor.dtype == dtype and tensor.shape == want.shape and tensor.is_contiguous()
            assert torch.equal(bits(tensor), bits(want)), dtype


def test_arrays_arrive_as_tensors(pair: Pair) -> None:
    a, b = pair
    rows = np.arange(24, dtype=np.int32).reshape(4, 6)
    sent = [rows, rows[1:, ::2], rows.T, np.array([True, False]), np.zeros((0, 3), np.float16)]
    a.send("b", tag(), Arrays(sent, {"fields": ["x"]}))
    got = b.recv("a", tag(), WAIT_S)
    assert got.meta == {"fields": ["x"]}
    for want, tensor in zip(sent, got.tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(want.copy())) and tensor.is_contiguous()


@pytest.mark.parametrize("dtype", ["O", "U3", ">i4", "M8[s]"])
def test_arrays_that_no_tensor_can_hold_are_refused(pair: Pair, dtype: str) -> None:
    with pytest.raises(TransportError, match="cannot travel"):
        pair[0].send("b", tag(), Arrays([np.zeros(2, np.dtype(dtype))]))


def test_conjugated_and_negated_views_arrive_resolved(pair: Pair) -> None:
    a, b = pair
    z = torch.randn(3, dtype=torch.complex64)
    a.send("b", tag(), Message([z.conj(), z.conj().imag]))
    conj, imag = b.recv("a", tag(), WAIT_S).tensors
    assert torch.equal(conj, z.conj().resolve_conj()) and torch.equal(imag, -z.imag)


def test_received_tensors_are_writable_and_have_no_history(pair: Pair) -> None:
    a, b = pair
    weight = torch.ones(3, requires_grad=True)
    a.send("b", tag(), Message([weight * 2, weight]))
    tensors = b.recv("a", tag(), WAIT_S).tensors
    for tensor in tensors:
        assert not tensor.requires_grad and tensor.is_leaf
        tensor.add_(1)
        assert tensor.data_ptr() % 64 == 0, "kernels round differently on unaligned memory"
    assert torch.equal(tensors[0], torch.full((3,), 3.0)) and torch.equal(weight, torch.ones(3))


def test_the_sender_may_change_its_tensors_at_once(pair: Pair) -> None:
    a, b = pair
    tensor = torch.zeros(1 << 20)
    for i in range(5):
        tensor.fill_(i)
        a.send("b", tag(i), Message([tensor]))
    tensor.fill_(-1)
    for i in range(5):
        assert b.recv("a", tag(i), WAIT_S).tensors[0].eq(i).all()


def test_tags_may_be_asked_for_in_any_order_and_both_ways_at_once(pair: Pair) -> None:
    a, b = pair
    tags = [tag(i, kind=kind, step=step) for i in range(3) for kind in "FB" for step in (1, 2)]
    for i, t in enumerate(tags):
        a.send("b", t, Message([torch.tensor(i)]))
        b.send("a", t, Message([torch.tensor(-i), torch.ones(i)]))
    for i, t in reversed(list(enumerate(tags))):
        assert b.recv("a", t, WAIT_S).tensors[0].item() == i
        assert a.recv("b", t, WAIT_S).tensors[1].shape == (i,)


def test_equal_tags_come_in_order(pair: Pair) -> None:
    a, b = pair
    for i in range(4):
        a.send("b", tag(), Message([torch.tensor(i)]))
    assert [b.recv("a", tag(), WAIT_S).tensors[0].item() for _ in range(4)] == [0, 1, 2, 3]


def test_what_has_arrived_is_seen_without_waiting(pair: Pair) -> None:
    a, b = pair
    assert not b.has("a", tag())
    a.send("b", tag(1), Message([]))
    a.send("b", tag(), Message([torch.tensor(5)]))
    deadline = time.monotonic() + WAIT_S
    while not b.has("a", tag()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert b.has("a", tag()) and not b.has("a", tag(2))
    assert b.recv("a", tag(), 0.0).tensors[0].item() == 5
    assert not b.has("a", tag())
    b.interrupt(WorkerLostError("a died"))
    with pytest.raises(WorkerLostError):
        b.has("a", tag(1))
    b.advance(1)
    with pytest.raises(FencedError):
        b.has("a", tag(1))


def test_large_tensors_and_byte_counts(pair: Pair) -> None:
    a, b = pair
    large = torch.arange(6 << 20, dtype=torch.int64)  # 48 MiB
    a.send("b", tag(), Message([large, torch.ones(1)]))
    got = b.recv("a", tag(), WAIT_S)
    assert torch.equal(got.tensors[0], large)
    assert a.bytes_sent == b.bytes_received == large.nbytes + 4
    assert a.bytes_received == b.bytes_sent == 0


def test_a_wait_is_bounded_and_names_peer_tag_and_time(pair: Pair) -> None:
    a, b = pair
    a.send("b", tag(1), Message([]))
    start = time.monotonic()
    with pytest.raises(StallError) as caught:
        b.recv("a", tag(2, step=7), 0.3)
    assert 0.3 <= time.monotonic() - start < 2
    text = str(caught.value)
    assert "b waited 0.3 s" in text and "from a" in text
    assert "F2 of step 7, generation 0" in text and "elastic.stall_limit_s" in text
    assert b.recv("a", tag(1), WAIT_S).tensors == []


def test_interrupt_wakes_a_waiting_recv_at_once_and_holds_until_the_next_generation(
    pair: Pair,
) -> None:
    a, b = pair
    caught: list[Exception] = []
    raised_at: list[float] = []

    def wait() -> None:
        try:
            b.recv("a", tag(), WAIT_S)
        except Exception as error:
            caught.append(error)
            raised_at.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    threading.Event().wait(0.1)  # so that it waits; the assertions hold without, too
    lost = WorkerLostError("stage-1 died")
    start = time.monotonic()
    b.interrupt(lost)
    thread.join(WAIT_S)
    assert caught == [lost] and raised_at[0] - start < 1
    b.interrupt(WorkerLostError("a later one"))
    with pytest.raises(WorkerLostError, match="stage-1"):
        b.recv("a", tag(), WAIT_S)
    with pytest.raises(WorkerLostError, match="stage-1"):
        b.send("a", tag(), Message([]))
    a.send("b", tag(generation=1), Message([torch.tensor(5)]))
    b.advance(1)
    assert b.recv("a", tag(generation=1), WAIT_S).tensors[0].item() == 5


def test_older_generations_are_fenced_in_both_directions(pair: Pair) -> None:
    a, b = pair
    old, new = tag(generation=1), tag(generation=2)
    a.advance(1)
    a.send("b", old, Message([torch.tensor(1)]))  # buffered in b while b is still in generation 0
    a.send("b", tag(7, generation=1), Message([torch.tensor(7)]))
    assert b.recv("a", tag(7, generation=1), WAIT_S).tensors[0].item() == 7
    b.advance(2)  # drops what was buffered
    a.send("b", old, Message([torch.tensor(2)]))  # arrives too late: dropped on arrival
    a.advance(2)
    a.send("b", new, Message([torch.tensor(3)]))
    assert b.recv("a", new, WAIT_S).tensors[0].item() == 3
    with pytest.raises(StallError):
        b.recv("a", new, 0.1)
    assert b.num_dropped == 2  # type: ignore[attr-defined]
    with pytest.raises(FencedError, match="generation 1 is over, generation is 2"):
        a.send("b", old, Message([]))
    with pytest.raises(FencedError, match="receive from a"):
        b.recv("a", old, WAIT_S)
    with pytest.raises(FencedError, match="cannot return"):
        b.advance(1)


def test_a_recv_that_waits_when_its_generation_ends_is_fenced(pair: Pair) -> None:
    _, b = pair
    timer = threading.Timer(0.1, b.advance, [1])
    timer.start()
    start = time.monotonic()
    with pytest.raises(FencedError):
        b.recv("a", tag(), WAIT_S)
    timer.join()
    assert time.monotonic() - start < 5


def test_close_wakes_a_waiting_recv_and_is_final(pair: Pair) -> None:
    a, b = pair
    timer = threading.Timer(0.1, b.close)
    timer.start()
    with pytest.raises(TransportError, match="channel of b is closed"):
        b.recv("a", tag(), WAIT_S)
    timer.join()
    b.close()
    b.advance(3)
    b.interrupt(WorkerLostError("nobody"))
    with pytest.raises(TransportError, match="closed"):
        b.send("a", tag(generation=3), Message([]))
    with pytest.raises(TransportError, match="closed"):
        b.recv("a", tag(generation=3), WAIT_S)


def test_what_cannot_travel_is_refused(pair: Pair) -> None:
    a, _ = pair
    with pytest.raises(TransportError, match="cannot travel"):
        a.send("b", tag(), Message([torch.ones(2, 2).to_sparse()]))
    with pytest.raises(TransportError, match="cannot travel"):
        a.send("b", tag(), Message([], {"x": object()}))


def held() -> set[object]:
    """Descriptors, threads and temporary folders that this process holds."""
    descriptors: set[object] = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:
            continue  # the descriptor that listed them
    folders = Path(tempfile.gettempdir()).glob(f"elastic-{os.getpid()}-*")
    return descriptors.union(threading.enumerate(), folders)


def test_closing_leaves_no_descriptor_thread_or_folder(
    kind: str, connected: Callable[[str], Pair]
) -> None:
    def use() -> None:
        a, b = connected(kind)
        a.send("b", tag(), Message([torch.ones(1 << 16)]))
        b.send("a", tag(), Message([torch.ones(3)]))
        assert b.recv("a", tag(), WAIT_S) and a.recv("b", tag(), WAIT_S)
        b.send("a", tag(1), Message([]))  # never asked for
        a.close()
        b.close()

    use()  # what libraries open once and for all
    gc.collect()
    before = held()
    for _ in range(3):
        use()
    deadline = time.monotonic() + WAIT_S
    while left := held() - before:
        gc.collect()
        assert time.monotonic() < deadline, left


def test_a_server_receives_whatever_comes_in_its_generation(pair: Pair) -> None:
    a, b = pair
    assert isinstance(b, BufferedChannel)
    assert b.recv_any(0) is None
    for i in range(3):
        a.send("b", tag(i, kind="Q"), Message([torch.tensor([i])]))
    got = [received_any(b) for _ in range(3)]
    assert [(peer, t.microbatch, m.tensors[0].item()) for peer, t, m in got] == [
        ("a", i, i) for i in range(3)
    ]
    a.send("b", tag(4, generation=2), Message([torch.ones(1)]))  # b has not heard of it yet
    a.send("b", tag(5), Message([torch.ones(1)]))
    assert received_any(b)[1].microbatch == 5
    assert b.recv_any(0.05) is None
    a.send("b", tag(6), Message([torch.ones(1)]))
    b.advance(2)
    assert received_any(b)[1].microbatch == 4
    assert b.recv_any(0.05) is None, "that of generation 0 is over"


def test_a_server_that_waits_is_woken_and_interrupted(pair: Pair) -> None:
    _, b = pair
    assert isinstance(b, BufferedChannel)
    for act in (b.wake, lambda: b.interrupt(WorkerLostError("over"))):
        timer = threading.Timer(0.05, act)
        timer.start()
        begin = time.monotonic()
        if act == b.wake:
            assert b.recv_any(WAIT_S) is None
        else:
            with pytest.raises(WorkerLostError):
                while time.monotonic() < begin + WAIT_S:
                    b.recv_any(WAIT_S)
        assert time.monotonic() - begin < WAIT_S / 2


def received_any(channel: BufferedChannel) -> tuple[str, Tag, Message]:
    """The next message; a wait may end early without one."""
    deadline = time.monotonic() + WAIT_S
    while (got := channel.recv_any(WAIT_S)) is None:
        assert time.monotonic() < deadline
    return got
