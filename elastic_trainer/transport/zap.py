"""Who may connect: the authentication handler that ZeroMQ asks during each handshake."""

import hmac
import threading
from collections import deque

import zmq

from elastic_trainer.types import WorkerId

DOMAIN = "elastic-trainer"


_RETRY_MS = 20
_MAX_WAITING = 256


class Gatekeeper:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) from a list of known peers.

    A thread of its own, because peers shake hands while the compute thread computes. Whoever is not
    known waits outside until `allow` names it or ZeroMQ ends the handshake: either side may connect
    before the other one has heard of it, and a client that was refused would never try again.

    Args:
        context: the context whose sockets ask; terminating it ends the thread.
        password: what an unencrypted peer must know; None if peers prove themselves by key.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", password: str | None) -> None:
        self._password = password
        self._peers: dict[bytes, WorkerId] = {}
        self._waiting: deque[list[bytes]] = deque(maxlen=_MAX_WAITING)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self.thread = threading.Thread(target=self._answer, name="gatekeeper", daemon=True)
        self.thread.start()

    def allow(self, peer: WorkerId, credential: bytes) -> None:
        """Let in who proves to hold `credential`: a public key, or without encryption a name."""
        self._peers[credential] = peer

    def revoke(self, credential: bytes) -> None:
        self._peers.pop(credential, None)

    def _answer(self) -> None:
        try:
            while True:
                if self._socket.poll(_RETRY_MS if self._waiting else None):
                    self._waiting.append(self._socket.recv_multipart())
                for _ in range(len(self._waiting)):
                    request = self._waiting.popleft()
                    if not self._admit(request):
                        self._waiting.append(request)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _admit(self, request: list[bytes]) -> bool:
        sender, empty, version, request_id, _, _, _, mechanism, *credentials = request
        peer = self._identify(mechanism, credentials)
        if peer is None:
            return False
        reply = [b"200", b"OK", peer.encode(), b""]
        self._socket.send_multipart([sender, empty, version, request_id, *reply])
        return True

    def _identify(self, mechanism: bytes, credentials: list[bytes]) -> WorkerId | None:
        if self._password is None:
            if mechanism == b"CURVE" and len(credentials) == 1:
                return self._peers.get(credentials[0])
        elif mechanism == b"PLAIN" and len(credentials) == 2:
            if hmac.compare_digest(credentials[1], self._password.encode()):
                return self._peers.get(credentials[0])
        return None
