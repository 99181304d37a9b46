"""Tensors over torch.distributed: NCCL between CUDA workers, gloo on the CPU (its test twin).

A blocked gloo or NCCL receive cannot be interrupted, and it must know the shape. So the header of
each message goes over ZeroMQ, as any other, and the receive is posted once it is here: waiting,
fencing and authentication are those of `ZmqChannel`, and a posted receive has its sender.
"""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_trainer.errors import StallError, TransportError
from elastic_trainer.transport import codec, tensors
from elastic_trainer.transport.channel import Message, Outgoing, Tag
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import WorkerId

# torch ships no types for these
_c10d: Any = dist
_cuda: Any = torch.cuda

log = logging.getLogger(__name__)

_SENDER, _RECEIVER = 0, 1
_POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Tensors to send from or to receive into, once `ready` has passed on the compute stream."""

    tag: Tag
    tensors: Sequence[Tensor]
    ready: Any
    done: Callable[[], None]


class _Edge:
    """One direction between two workers: a two-rank group and the thread that drives it.

    Directions have groups of their own, since NCCL works off the operations of a group in order:
    with one group, two workers that both send first would wait for each other.
    """

    def __init__(
        self,
        make_group: Callable[[], dist.ProcessGroup],
        rank: int,
        device: torch.device,
        timeout_s: float,
        on_error: Callable[[Tag, Exception], None],
    ) -> None:
        self.failed = False
        self._make_group = make_group
        self._rank = rank
        self._stream = _cuda.Stream(device) if device.type == "cuda" else None
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="torch-edge", daemon=True)
        self.thread.start()

    def put(self, transfer: _Transfer) -> None:
        self._transfers.put(transfer)

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        self._transfers.put(None)

    def _run(self) -> None:
        group: dist.ProcessGroup | None = None
        while (transfer := self._transfers.get()) is not None:
            try:
                group = group or self._make_group()
                self._perform(group, transfer)
            except Exception as error:
                self.failed = True
                self._on_error(transfer.tag, error)
                break
        if group is not None and self._stream is not None:
            group.abort()

    def _perform(self, group: dist.ProcessGroup, transfer: _Transfer) -> None:
        move = group.send if self._rank == _SENDER else group.recv
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            if self._stream is not None and transfer.ready is not None:
                self._stream.wait_event(transfer.ready)
            # As bytes, because the backends do not know every dtype.
            flat = [t.reshape(-1).view(torch.uint8) for t in transfer.tensors if t.numel()]
            for work in [move([tensor], 1 - self._rank, 0) for tensor in flat]:
                self._finish(work)
        transfer.done()

    def _finish(self, work: dist.Work) -> None:
        if self._stream is None:
            work.wait(timedelta(seconds=self._timeout_s))
            return
        work.wait()  # on CUDA this only orders our stream behind the transfer
        end = _cuda.Event()
        end.record(self._stream)
        deadline = time.monotonic() + self._timeout_s
        while not end.query():
            if time.monotonic() > deadline:
                raise StallError(f"a transfer did not end within {self._timeout_s} s")
            time.sleep(_POLL_S)


class TorchChannel(ZmqChannel):
    """Headers over ZeroMQ, tensors over a two-rank process group per direction of each edge.

    Args:
        worker: whose channel it is.
        private_dir, bind_ip, encryption: as for `ZmqChannel`; they concern headers only.
        device: where tensors lie on both sides: cuda takes NCCL, cpu takes gloo.
        timeout_s: longest wait for a group to form and for one message to pass.
    """

    def __init__(
        self,
        worker: WorkerId,
        *,
        private_dir: Path | None = None,
        bind_ip: str = "127.0.0.1",
        encryption: bool = True,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            worker,
            private_dir=private_dir,
            bind_ip=bind_ip,
            encryption=encryption,
            device=device,
        )
        self._device: torch.device = torch.device(device)
        self._bind_ip = bind_ip
        self._timeout = timedelta(seconds=timeout_s)
        self._outgoing: dict[WorkerId, tuple[str, _Edge]] = {}
        self._incoming: dict[WorkerId, tuple[str, _Edge]] = {}
        self._store: Any = None
        try:
            # torch's store waits for all ranks unless told not to; its port is any free one.
            self._store = _c10d.TCPStore(
                bind_ip, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
        except RuntimeError as error:
            self.close()
            raise TransportError(f"{worker} cannot open a store on {bind_ip}: {error}") from error
        self._store_port = self._store.port
        log.warning(
            "%s: torch.distributed neither authenticates nor encrypts its connections; use "
            "transport.channel=torch in a private network only",
            worker,
        )

    def address(self) -> dict[str, Any]:
        store = {"ip": self._bind_ip, "port": self._store_port}
        return {**super().address(), "channel": "torch", "store": store}

    def connect(self, peer: WorkerId, address: dict[str, Any]) -> None:
        if address.get("channel") != "torch":
            raise TransportError(f"not a torch address of {peer}")
        super().connect(peer, {**address, "channel": "zmq"})

    def send(self, peer: WorkerId, tag: Tag, message: Outgoing) -> None:
        self._inbox.check(tag, f"send to {peer}")
        given = tensors.as_message(message)
        if peer not in self._peers:
            raise TransportError(f"{self.worker} is not connected to {peer}")
        if peer not in self._outgoing:
            name = secrets.token_hex(8)
            edge = self._edge(name, _SENDER, self._peers[peer][0]["store"])
            self._outgoing[peer] = (name, edge)
        name, edge = self._outgoing[peer]
        facts = {"edge": name, "meta": given.meta}
        shapes = tensors.shapes_of(given.tensors)
        header = codec.encode_header(self.worker, tag, shapes, facts)
        copies = [
            tensor.detach().to(self._device).clone(memory_format=torch.contiguous_format)
            for tensor in given.tensors
        ]
        self._post(peer, tag, [header])
        edge.put(_Transfer(tag, copies, self._now(), lambda: None))
        self._bytes_sent += sum(tensor.nbytes for tensor in copies)

    def advance(self, generation: int) -> None:
        """As for any channel; each generation sends through groups of its own, because one that
        failed or was left in the middle of a transfer is of no use any more.
        """
        is_new = generation > self._inbox.generation
        super().advance(generation)
        if is_new:
            with self._send_lock:
                for _, edge in self._outgoing.values():
                    edge.close()
                self._outgoing.clear()

    def close(self) -> None:
        edges = [edge for _, edge in (*self._outgoing.values(), *self._incoming.values())]
        for edge in edges:
            edge.close()
        super().close()
        for edge in edges:
            edge.thread.join(timeout=1.0)
        self._outgoing.clear()
        self._incoming.clear()
        self._store = None

    def _arrive(self, header: codec.Header, buffers: Sequence[codec.Frame]) -> None:
        try:
            name, meta = header.meta["edge"], header.meta["meta"]
            types = tensors.TYPES
            into = [torch.empty(s, dtype=types[d], device=self._device) for d, s in header.shapes]
        except (KeyError, RuntimeError, OverflowError, TypeError) as error:
            raise TransportError(f"{header.tag} has a malformed header: {error!r}") from error
        current, edge = self._incoming.get(header.sender, ("", None))
        if edge is not None and name == current and edge.failed:
            raise TransportError(f"the group for tensors from {header.sender} has failed")
        if edge is None or name != current:
            if edge is not None:
                edge.close()
            own_store = {"ip": self._bind_ip, "port": self._store_port}
            edge = self._edge(name, _RECEIVER, own_store)
            self._incoming[header.sender] = (name, edge)
        done = partial(self._deliver, header, Message(into, meta))
        # Also when its generation is over: the group hands out tensors in the order of sending.
        edge.put(_Transfer(header.tag, into, self._now(), done))

    def _deliver(self, header: codec.Header, message: Message) -> None:
        self._bytes_received += sum(tensor.nbytes for tensor in message.tensors)
        self._inbox.put(header.sender, header.tag, message)
        self._wake()

    def _fail(self, tag: Tag, error: Exception) -> None:
        reason = f"the transfer of {tag} failed on {self.worker}: {error}"
        self._inbox.interrupt(TransportError(reason), tag.generation)
        self._wake()

    def _hang_up(self, peer: WorkerId) -> None:
        super()._hang_up(peer)
        for edges in (self._outgoing, self._incoming):
            _, edge = edges.pop(peer, ("", None))
            if edge is not None:
                edge.close()

    def _now(self) -> Any:
        """The point that the compute stream has reached; None where there are no streams."""
        if self._device.type != "cuda":
            return None
        event = _cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _edge(self, name: str, rank: int, store: dict[str, Any]) -> _Edge:
        make = partial(self._make_group, name, rank, store)
        return _Edge(make, rank, self._device, self._timeout.total_seconds(), self._fail)

    def _make_group(self, name: str, rank: int, store: dict[str, Any]) -> dist.ProcessGroup:
        client = _c10d.TCPStore(store["ip"], store["port"], is_master=False, timeout=self._timeout)
        prefixed = _c10d.PrefixStore(name, client)
        is_cuda = self._device.type == "cuda"
        backend = _c10d.ProcessGroupNCCL if is_cuda else _c10d.ProcessGroupGloo
        options = backend.Options() if is_cuda else backend._Options()
        options._timeout = self._timeout
        if not is_cuda:
            options._devices = [backend.create_device(hostname=self._bind_ip)]
        group: dist.ProcessGroup = backend(prefixed, rank, 2, options)
        return group
