"""The default channel: ZeroMQ, within a host over ipc, between hosts over authenticated tcp."""

import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from elastic_trainer.errors import TransportError
from elastic_trainer.transport import codec, zap
from elastic_trainer.transport.channel import Message, Outgoing, Tag
from elastic_trainer.transport.inbox import BufferedChannel
from elastic_trainer.types import WorkerId

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_MAX_IPC_PATH = 100  # the kernel's limit is 107 bytes
_LINGER_MS = 1000  # how long close() goes on delivering what was sent
_HANDSHAKE_MS = 5000  # then whoever was not let in is hung up on, and may call again
_Socket = zmq.Socket[bytes]


def host_id() -> str:
    """Equal for processes that can meet at a path: same kernel, user, network and file system."""
    parts = [socket.gethostname(), str(os.getuid())]
    for path in ("/proc/self/ns/net", "/proc/self/ns/mnt"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path))
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)


class ZmqChannel(BufferedChannel):
    """One PULL socket on ipc and one on tcp for all peers, one PUSH socket to each peer.

    The ipc socket lies in a folder that only this user can enter. On tcp a peer must hold a key
    that `connect` announced; with `encryption=False`, the password that is part of the address.
    Queues are unlimited, because the schedule bounds what is in flight and a send must not wait.

    Args:
        worker: whose channel it is.
        private_dir: folder for the ipc socket, created if missing, removed with the last socket in
            it; None makes a temporary one.
        bind_ip: address on which peers on other hosts reach this one.
        encryption: whether tcp is encrypted (CURVE).
        device: where received tensors go.
    """

    def __init__(
        self,
        worker: WorkerId,
        *,
        private_dir: Path | None = None,
        bind_ip: str = "127.0.0.1",
        encryption: bool = True,
        device: "torch.device | str" = "cpu",
    ) -> None:
        super().__init__(worker)
        self._device = device
        self._peers: dict[WorkerId, tuple[dict[str, Any], _Socket]] = {}
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._password = None if encryption else secrets.token_urlsafe(32)
        self._folder, self._owns_folder = _private_folder(private_dir)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._gatekeeper = zap.Gatekeeper(self._context, self._password)
        try:
            self._listen(bind_ip)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"{worker} cannot listen on {bind_ip}: {error}") from error
        if not encryption:
            log.warning(
                "%s: transport.encryption is off. Tensors and the password that peers show travel "
                "between hosts in the clear. Use it in a private network only. It saves about 1.3 "
                "ms per MiB: a core encrypts 0.5 to 0.7 GB/s and copies 2 to 3.5 GB/s.",
                worker,
            )

    def address(self) -> dict[str, Any]:
        return {
            "channel": "zmq",
            "worker": self.worker,
            "host": host_id(),
            "ipc": self._ipc_endpoint,
            "tcp": self._tcp_endpoint,
            "key": self._public_key.decode(),
            "password": self._password,
        }

    def connect(self, peer: WorkerId, address: dict[str, Any]) -> None:
        if address.get("channel") != "zmq" or address.get("worker") != peer:
            raise TransportError(f"not a ZeroMQ address of {peer}")
        if (address["password"] is None) != (self._password is None):
            raise TransportError(
                f"{self.worker} and {peer} disagree on encryption",
                "transport.encryption must be the same on all workers",
            )
        with self._send_lock:
            if peer in self._peers and self._peers[peer][0] == address:
                return
            self._hang_up(peer)
            self._gatekeeper.allow(peer, self._credential(address))
            self._peers[peer] = (address, self._dial(address))

    def disconnect(self, peer: WorkerId) -> None:
        with self._send_lock:
            self._hang_up(peer)
        self._inbox.forget(peer)

    def send(self, peer: WorkerId, tag: Tag, message: Outgoing) -> None:
        self._inbox.check(tag, f"send to {peer}")
        frames = codec.encode(self.worker, tag, message)
        self._post(peer, tag, frames)
        self._bytes_sent += sum(map(len, frames[1:]))

    def _post(self, peer: WorkerId, tag: Tag, frames: Sequence[codec.Frame]) -> None:
        with self._send_lock:
            if peer not in self._peers:
                raise TransportError(f"{self.worker} is not connected to {peer}")
            try:
                self._peers[peer][1].send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise TransportError(
                    f"{self.worker} cannot send {tag} to {peer}: {error}",
                    "the peer may have refused this worker's key",
                ) from error

    def close(self) -> None:
        self._shut()
        with self._send_lock, self._recv_lock:
            if self._context.closed:
                return
            for _, peer in self._peers.values():
                peer.close(linger=_LINGER_MS)
            self._peers.clear()
            self._ipc.close(linger=0)
            self._tcp.close(linger=0)
            self._context.term()  # also ends the gatekeeper's thread
            self._gatekeeper.thread.join()
            self._wake_reader.close()
            self._wake_writer.close()
            Path(self._ipc_endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            if self._owns_folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # others of this node still have sockets in it
                    self._folder.rmdir()

    def _listen(self, bind_ip: str) -> None:
        self._ipc = self._socket(zmq.PULL)
        self._tcp = self._socket(zmq.PULL)
        self._poller = zmq.Poller()
        for source in (self._ipc, self._tcp, self._wake_reader):
            self._poller.register(source, zmq.POLLIN)
        name = secrets.token_hex(6)
        self._ipc_endpoint = f"ipc://{self._folder}/{name}"
        self._ipc.bind(self._ipc_endpoint)
        self._tcp.zap_domain = zap.DOMAIN.encode()
        # Without this, ZeroMQ would let everybody in should the gatekeeper ever be gone.
        self._tcp.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._password is None:
            self._tcp.curve_server = True
            self._tcp.curve_secretkey = self._secret_key
        else:
            self._tcp.plain_server = True
        host = f"[{bind_ip}]" if ":" in bind_ip else bind_ip
        self._tcp.bind(f"tcp://{host}:*")
        self._tcp_endpoint = str(self._tcp.get_string(zmq.LAST_ENDPOINT))

    def _dial(self, address: dict[str, Any]) -> _Socket:
        peer = self._socket(zmq.PUSH)
        if address["host"] == host_id() and Path(address["ipc"].removeprefix("ipc://")).exists():
            peer.connect(address["ipc"])
            return peer
        if self._password is None:
            peer.curve_serverkey = address["key"].encode()
            peer.curve_publickey = self._public_key
            peer.curve_secretkey = self._secret_key
        else:
            peer.plain_username = self.worker.encode()
            peer.plain_password = address["password"].encode()
        peer.connect(address["tcp"])
        return peer

    def _socket(self, kind: int) -> _Socket:
        made = self._context.socket(kind)
        made.hwm = 0
        made.ipv6 = True
        made.linger = 0
        made.handshake_ivl = _HANDSHAKE_MS
        # No heartbeats: a peer that is slow or stopped for a while must not lose what was sent;
        # who is dead is decided by deadlines.
        made.reconnect_ivl = 20
        made.reconnect_ivl_max = 500
        return made

    def _hang_up(self, peer: WorkerId) -> None:
        if peer in self._peers:
            address, old = self._peers.pop(peer)
            old.close(linger=0)
            self._gatekeeper.revoke(self._credential(address))

    def _credential(self, address: dict[str, Any]) -> bytes:
        if self._password is not None:
            return str(address["worker"]).encode()
        key: bytes = z85.decode(address["key"])
        return key

    def _pump(self, seen: int, timeout_s: float) -> None:
        with self._recv_lock:
            if self._context.closed:
                return
            for source, _ in self._poller.poll(math.ceil(timeout_s * 1000)):
                if source is self._ipc or source is self._tcp:
                    self._receive(source)
                else:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_reader.recv(4096)

    def _receive(self, source: _Socket) -> None:
        """Move one message from the socket to the inbox."""
        try:
            frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            header = codec.decode_header(frames[0].bytes)
            # On tcp the handshake proved who it is; nobody may speak in another one's name.
            if source is self._tcp and _authenticated_name(frames[0]) != header.sender:
                raise TransportError(f"a peer sent {header.tag} in the name of {header.sender}")
            self._arrive(header, [frame.buffer for frame in frames[1:]])
        except zmq.Again:
            return
        except TransportError as error:
            self._inbox.interrupt(error)

    def _arrive(self, header: codec.Header, buffers: Sequence[codec.Frame]) -> None:
        from elastic_trainer.transport import tensors  # torch: the loader receives nothing

        received = tensors.read_tensors(header, buffers, self._device)
        self._bytes_received += sum(map(len, buffers))
        self._inbox.put(header.sender, header.tag, Message(received, header.meta))

    def _wake(self) -> None:
        # A full pipe wakes as well as one more byte; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"!")


def _authenticated_name(frame: zmq.Frame) -> str | None:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None


def _private_folder(wanted: Path | None) -> tuple[Path, bool]:
    """A folder that only this user can enter, and whether it is ours to remove."""
    if wanted is None:
        parent = tempfile.gettempdir()
        if len(parent) > _MAX_IPC_PATH - 40:
            parent = "/tmp"
        return Path(tempfile.mkdtemp(prefix=f"elastic-{os.getpid()}-", dir=parent)), True
    wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = wanted.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise TransportError(
            f"{wanted} is not a folder that only user {os.getuid()} can enter",
            "remove it or run chmod 700 on it",
        )
    if len(os.fsencode(wanted)) > _MAX_IPC_PATH - 13:
        raise TransportError(f"the path {wanted} is too long for a socket", "use a shorter one")
    return wanted, False
