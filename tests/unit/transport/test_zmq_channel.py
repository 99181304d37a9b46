"""Who gets in, what malformed frames do, and where sockets lie."""

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from elastic_trainer.errors import StallError, TransportError
from elastic_trainer.transport import codec, zap
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.zmq_channel import ZmqChannel

WAIT_S = 20.0
TAG = Tag(0, "F", 1, 0)
ZmqPair = tuple[ZmqChannel, ZmqChannel]
Setup = Callable[["zmq.Socket[bytes]", dict[str, Any]], None]


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def nothing(socket: "zmq.Socket[bytes]", address: dict[str, Any]) -> None:
    """No credentials at all."""


def own_key(socket: "zmq.Socket[bytes]", address: dict[str, Any]) -> None:
    """The receiver's public key, and a key pair that it has never heard of."""
    socket.curve_serverkey = address["key"].encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def guessed_password(socket: "zmq.Socket[bytes]", address: dict[str, Any]) -> None:
    socket.plain_username, socket.plain_password = b"a", secrets.token_urlsafe(32).encode()


def unknown_name(socket: "zmq.Socket[bytes]", address: dict[str, Any]) -> None:
    socket.plain_username = b"stranger"
    socket.plain_password = (address["password"] or "").encode()


@pytest.mark.parametrize(
    ("encryption", "setup"),
    [
        (True, nothing),
        (True, own_key),
        (True, guessed_password),
        (False, nothing),
        (False, own_key),
        (False, guessed_password),
        (False, unknown_name),
    ],
)
def test_a_stranger_delivers_nothing(
    context: "zmq.Context[zmq.Socket[bytes]]",
    encryption: bool,
    setup: Setup,
    connected: Callable[[str], ZmqPair],
) -> None:
    a, b = connected("zmq_tcp" if encryption else "zmq_plain")
    stranger = context.socket(zmq.PUSH)
    setup(stranger, b.address())
    stranger.connect(b.address()["tcp"])
    forged = Message([torch.tensor(666)])
    stranger.send_multipart(codec.encode("a", TAG, forged))
    with pytest.raises(StallError):
        b.recv("a", TAG, 0.5)
    a.send("b", TAG, Message([torch.tensor(1)]))
    assert b.recv("a", TAG, WAIT_S).tensors[0].item() == 1
    with pytest.raises(StallError):
        b.recv("a", TAG, 0.2)
    assert b.bytes_received == 8
    stranger.close(linger=0)
    a.close()
    b.close()


def test_nobody_delivers_when_the_gatekeeper_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    # ZeroMQ lets everybody in when nobody answers its questions, unless told not to.
    monkeypatch.setattr(zap.Gatekeeper, "_answer", lambda self: self._socket.close())
    a, b = ZmqChannel("a"), ZmqChannel("b")
    a.connect("b", {**b.address(), "host": "another"})
    a.send("b", TAG, Message([]))
    with pytest.raises(StallError):
        b.recv("a", TAG, 0.5)
    a.close()
    b.close()


@pytest.mark.parametrize("encryption", [True, False])
def test_either_side_may_connect_first(encryption: bool) -> None:
    a, b = ZmqChannel("a", encryption=encryption), ZmqChannel("b", encryption=encryption)
    a.connect("b", {**b.address(), "host": "another"})
    a.send("b", TAG, Message([torch.tensor(1)]))
    with pytest.raises(StallError):
        b.recv("a", TAG, 0.3)
    b.connect("a", {**a.address(), "host": "another"})
    assert b.recv("a", TAG, WAIT_S).tensors[0].item() == 1
    a.close()
    b.close()


def test_a_disconnected_peer_cannot_come_back(zmq_pair: ZmqPair) -> None:
    a, b = zmq_pair
    a.send("b", TAG, Message([]))
    assert b.recv("a", TAG, WAIT_S)
    b.disconnect("a")
    with pytest.raises(TransportError, match="b is not connected to a"):
        b.send("a", TAG, Message([]))
    address = {**b.address(), "host": "another"}
    a.disconnect("b")
    a.connect("b", address)
    a.send("b", TAG, Message([]))
    with pytest.raises(StallError):
        b.recv("a", TAG, 0.5)


def test_no_peer_speaks_in_the_name_of_another(zmq_pair: ZmqPair) -> None:
    a, b = zmq_pair
    a.worker = "c"
    a.send("b", TAG, Message([]))
    with pytest.raises(TransportError, match="in the name of c"):
        b.recv("a", TAG, WAIT_S)


GOOD = bytes(codec.encode("a", TAG, Message([torch.ones(2)]))[0])
NUMBERS = codec._NUMBERS.size


def with_shapes(text: bytes) -> bytes:
    """A header that announces these shapes."""
    return codec._NUMBERS.pack(codec.VERSION, 0, 1, 0, 1, 1, len(text)) + b"aF" + text


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [GOOD[:NUMBERS]],
        [GOOD[:-1], b"\0" * 8],
        [b"\xff" + GOOD[1:], b"\0" * 8],
        [GOOD + b"[1]", b"\0" * 8],
        [GOOD + b'{"x"', b"\0" * 8],
        [GOOD],
        [GOOD, b"\0" * 8, b"\0" * 8],
        [GOOD, b"\0" * 7],
        [GOOD[:NUMBERS] + b"\xff" + GOOD[NUMBERS + 1 :], b"\0" * 8],
        [with_shapes(b'[["float32",[-2]]]'), b"\0" * 8],
        [with_shapes(b'[["float32",[-2,-1]]]'), b"\0" * 8],
        [with_shapes(b'[["float32",["2"]]]'), b"\0" * 8],
        [with_shapes(b'[["float31",[2]]]'), b"\0" * 8],
        [with_shapes(b'[["float32",[0,1000000000000000000000000000]]]'), b""],
        [with_shapes(b'[["float32"]]'), b"\0" * 8],
        [with_shapes(b'{"x":1}'), b"\0" * 8],
        [with_shapes(b"[" * 100_000), b"\0" * 8],
        [GOOD + b'{"x":' * 100_000, b"\0" * 8],
    ],
    ids=range(20),
)
def test_malformed_frames_from_a_peer_end_the_wait(zmq_pair: ZmqPair, frames: list[bytes]) -> None:
    a, b = zmq_pair
    a._post("b", TAG, frames)
    with pytest.raises(TransportError) as caught:
        b.recv("a", TAG, WAIT_S)
    assert type(caught.value) is TransportError and len(str(caught.value)) < 300
    b.advance(1)
    a.send("b", Tag(1, "F", 1, 0), Message([torch.tensor(5)]))
    assert b.recv("a", Tag(1, "F", 1, 0), WAIT_S).tensors[0].item() == 5


def test_sockets_lie_in_a_folder_for_this_user_only(short_folder: Path) -> None:
    wanted = short_folder / "run" / "sockets"
    channels = [ZmqChannel("a"), ZmqChannel("b", private_dir=wanted)]
    for channel in channels:
        path = Path(channel.address()["ipc"].removeprefix("ipc://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.is_socket() and len(os.fsencode(path)) < 100
        channel.close()
        assert not path.exists()


def test_the_folder_goes_with_the_last_socket_in_it(short_folder: Path) -> None:
    wanted = short_folder / "sockets"
    first, last = (ZmqChannel(name, private_dir=wanted) for name in "ab")
    first.close()
    assert list(wanted.iterdir()), "that of the other one"
    last.close()
    assert not wanted.exists() and short_folder.exists()


def test_a_folder_that_others_can_enter_or_that_is_too_deep_is_refused(short_folder: Path) -> None:
    open_to_all = short_folder / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(TransportError, match="only user"):
        ZmqChannel("a", private_dir=open_to_all)
    link = short_folder / "link"
    private = short_folder / "private"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    with pytest.raises(TransportError, match="only user"):
        ZmqChannel("a", private_dir=link)
    with pytest.raises(TransportError, match="too long for a socket"):
        ZmqChannel("a", private_dir=short_folder / ("x" * 90))


def test_an_address_that_is_not_ours_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(TransportError, match=r"a cannot listen on 192\.0\.2\.1"):
        ZmqChannel("a", bind_ip="192.0.2.1")


def test_both_ends_must_agree_on_encryption_and_name(zmq_pair: ZmqPair) -> None:
    a, b = zmq_pair
    plain = ZmqChannel("c", encryption=False)
    with pytest.raises(TransportError, match="a and c disagree on encryption"):
        a.connect("c", plain.address())
    with pytest.raises(TransportError, match="not a ZeroMQ address of c"):
        a.connect("c", b.address())
    plain.close()


def test_unencrypted_channels_say_what_that_costs_and_saves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ZmqChannel("a").close()
        assert not caplog.records
        ZmqChannel("a", encryption=False).close()
    assert "in the clear" in caplog.text and "It saves about" in caplog.text


def test_connecting_again_keeps_the_edge_and_a_new_address_replaces_it(zmq_pair: ZmqPair) -> None:
    a, b = zmq_pair
    socket = a._peers["b"][1]
    a.connect("b", {**b.address(), "host": "another"})
    assert a._peers["b"][1] is socket
    reborn = ZmqChannel("b")
    a.connect("b", reborn.address())
    reborn.connect("a", a.address())
    a.send("b", TAG, Message([torch.tensor(2)]))
    assert reborn.recv("a", TAG, WAIT_S).tensors[0].item() == 2
    assert socket.closed
    reborn.close()


def test_a_host_is_another_one_in_another_network_or_without_the_socket(
    zmq_pair: ZmqPair,
) -> None:
    a, b = zmq_pair
    address = b.address()

    def endpoint(address: dict[str, Any]) -> str:
        with a._dial(address) as dialled:
            return dialled.get_string(zmq.LAST_ENDPOINT).split(":")[0]

    assert endpoint(address) == "ipc"
    assert endpoint({**address, "host": "x"}) == "tcp"
    assert endpoint({**address, "ipc": "ipc:///nowhere"}) == "tcp"
