"""Processes that decode for a loader: started at the first use, shared, replaced when one dies.

A process of its own for each worker: a codec that crashes or hangs takes no loader with it, and
nobody waits for the interpreter's lock. Samples are small, answers are large, and both go through
a socket whose other end only this process has, so that a decoder ends with the loader, however that
ends.

What kills a decoder, or makes it hang, costs one sample at the most: the one that it was at is
tried once more, alone, in a fresh process. What is known already is not decoded again.
"""

import atexit
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakSet

from elastic_trainer.data.media import decoding, wire
from elastic_trainer.data.media.decoding import Files, Limits, Made
from elastic_trainer.data.media.made_cache import MadeCache
from elastic_trainer.data.media.notes import Notes
from elastic_trainer.errors import DataError

P = ParamSpec("P")
T = TypeVar("T")
Result = Made | DataError
# -P: not the folder that this happens to run in.
COMMAND = (sys.executable, "-P", "-m", "elastic_trainer.data.media.decoder_process")
START_S = 120.0  # that many only on a machine that has much else to do
_END_S = 5.0  # for a process that has closed its end, or was killed
_BUFFER_BYTES = 1 << 20  # of the socket; the system allows less. A sample more is made meanwhile
_HINT = "Remove it, or set data.on_error=skip"
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _Lost(Exception):
    """A decoder has ended, or was ended because it did not answer; how, and at which sample."""

    def __init__(self, story: str, place: int) -> None:
        super().__init__(story)
        self.place = place


class _Decoder:
    """One process, used by one thread at a time."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._notes = Notes()
        self._sock.settimeout(None)  # whatever the default is: the system keeps the time
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        try:
            with theirs:
                self._process = _started(theirs.fileno(), self._notes.descriptor)
        except OSError as error:
            self._close()
            raise _no_start(str(error)) from error
        try:
            self._limit(START_S)
            wire.receive(self._sock)
        except (OSError, EOFError) as error:
            story = self._story(error, f"was not there within {START_S:g} s")
            self.end()
            raise _no_start(f"it {story}") from error

    def ask(self, samples: Sequence[Files], limits: Limits, limit_s: float) -> list[Result]:
        """What becomes of each sample.

        Raises:
            _Lost: while it was at one of them.
        """
        silent = f"did not answer within {limit_s:g} s"
        self._notes.begin(0)
        try:
            self._limit(limit_s)
            wire.send(self._sock, (samples, limits))
            self._wait(limit_s, silent)
            answers: list[Result | Exception] = wire.receive(self._sock)
        except (OSError, EOFError) as error:
            raise _Lost(self._story(error, silent), self._notes.read()[0]) from error
        results: list[Result] = []
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, DataError):
                raise answer
            results.append(answer)
        return results

    def _wait(self, limit_s: float, silent: str) -> None:
        """Until an answer comes, as long as no sample takes more than `limit_s`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        left_s = limit_s
        while not poll.poll(left_s * 1000):
            place, taken_s = self._notes.read()
            left_s = limit_s - taken_s
            if left_s <= 0:
                raise _Lost(silent, place)

    def kill(self) -> None:
        """End the process; whoever waits for it sees that."""
        self._process.kill()

    def end(self) -> None:
        """End the process and close the socket, which nobody uses any more."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the system does not let it go yet
            self._process.wait(_END_S)
        self._close()

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        self._close()
        self._process.returncode = 0  # it is nobody's child here

    def _close(self) -> None:
        self._sock.close()
        self._notes.close()

    def _limit(self, seconds: float) -> None:
        time = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, time)

    def _story(self, error: Exception, silent: str) -> str:
        if isinstance(error, BlockingIOError):
            return silent
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"ended with exit status {code}"
        try:
            return f"died of signal {-code} ({signal.Signals(-code).name})"
        except ValueError:  # a real-time signal
            return f"died of signal {-code}"


class Decoders:
    """Threads that each wait for a process of their own.

    Args:
        count: of both; 0: whoever asks decodes by itself.
        cache_bytes: of what was decoded are kept in `cache`, because other samples have the same
            files; 0: none.
    """

    def __init__(self, count: int, cache_bytes: int) -> None:
        self.cache = MadeCache(cache_bytes)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decode") if count else None
        self._lock = threading.Lock()
        self._all: set[_Decoder] = set()
        self._idle: list[_Decoder] = []
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run what is going to call `decode`, in a thread if there are any."""
        if self._threads is not None:
            return self._threads.submit(function, *args, **kwargs)
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def decode(self, samples: Sequence[Files], limits: Limits, limit_s: float) -> list[Result]:
        """What becomes of each sample. Its arrays may be those of others, and are not written to.

        Args:
            samples: their files.
            limits: of sizes.
            limit_s: how long a sample may take.
        """
        return self.cache.through(
            samples, limits, lambda unknown: self._decode(unknown, limits, limit_s)
        )

    def _decode(self, samples: Sequence[Files], limits: Limits, limit_s: float) -> list[Result]:
        """What becomes of each sample, all of whose files are decoded."""
        if self._threads is None:
            return [decoding.make(files, limits) for files in samples]
        results: list[Result] = []
        suspect = len(samples)  # the place of the sample at which a decoder was lost
        while (done := len(results)) < len(samples):
            decoder = self._take()
            end = max(done + 1, suspect) if suspect >= done else len(samples)
            try:
                results += decoder.ask(samples[done:end], limits, limit_s)
            except _Lost as lost:
                self._drop(decoder)
                if done == suspect:
                    results.append(DataError(f"the decoder {lost} on it", _HINT))
                else:
                    suspect = done + min(lost.place, end - done - 1)
            except BaseException:
                self._drop(decoder)
                raise
            else:
                self._give_back(decoder)
        return results

    def close(self) -> None:
        """End the processes and the threads; what was not begun is cancelled, the rest fails."""
        if self._threads is not None:
            with self._lock:
                self._closed = True
                decoders = list(self._all)
            for decoder in decoders:
                decoder.kill()
            self._threads.shutdown(cancel_futures=True)
            for decoder in list(self._all):
                self._drop(decoder)
        self.cache.clear()

    def forget(self) -> None:
        """Leave the processes to the process that this one was forked from."""
        for decoder in self._all:
            decoder.forget()

    def _take(self) -> _Decoder:
        with self._lock:
            if self._closed:
                raise CancelledError("the decoders are closed")
            if self._idle:
                return self._idle.pop()
        decoder = _Decoder()
        with self._lock:
            self._all.add(decoder)
            if self._closed:  # meanwhile
                decoder.kill()
        return decoder

    def _give_back(self, decoder: _Decoder) -> None:
        with self._lock:
            self._idle.append(decoder)

    def _drop(self, decoder: _Decoder) -> None:
        with self._lock:
            self._all.discard(decoder)
        decoder.end()


_shared: dict[tuple[int, int], Decoders] = {}
_shared_lock = threading.Lock()
_holders: WeakSet[object] = WeakSet()


def shared(count: int, cache_bytes: int) -> Decoders:
    """The decoders of this process, as many as these, for all who read and keep as much."""
    with _shared_lock:
        if (count, cache_bytes) not in _shared:
            _shared[count, cache_bytes] = Decoders(count, cache_bytes)
        return _shared[count, cache_bytes]


def hold(holder: object) -> None:
    """Keep the decoders of this process until `release`, whoever else is done with them."""
    with _shared_lock:
        _holders.add(holder)


def release(holder: object) -> None:
    """Undo `hold`; the last one ends the processes. Whoever reads on starts new ones."""
    with _shared_lock:
        _holders.discard(holder)
        is_last = not _holders
    if is_last:
        close()


@contextmanager
def kept() -> Iterator[None]:
    """Keep the decoders of this process for a while, and leave none of them behind."""
    holder = _Holder()
    hold(holder)
    try:
        yield
    finally:
        release(holder)


class _Holder:
    """Nobody else."""


def close() -> None:
    """End all processes that decode for this one, and forget what they have made."""
    with _shared_lock:
        decoders = list(_shared.values())
        _shared.clear()
    for each in decoders:
        each.close()


def _forget() -> None:
    """A fork has copies of our sockets: decoders would outlive us, and answer either of us."""
    global _shared_lock
    for each in _shared.values():
        each.forget()
    _shared.clear()
    _holders.clear()
    _shared_lock = threading.Lock()


def _started(*descriptors: int) -> subprocess.Popen[bytes]:
    """A process that has this end of a socket, its notes, and nothing else of ours."""
    return subprocess.Popen(
        [*COMMAND, *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        env=_environment(),
        pass_fds=descriptors,
    )


def _no_start(why: str) -> DataError:
    return DataError(
        f"a process that decodes cannot be started: {why}",
        "See what it printed; data.media_workers=0 decodes in the loader itself",
    )


def _environment() -> dict[str, str]:
    """That of this process, with the modules that it finds, wherever it has them from."""
    root = Path(__file__).parents[3]
    paths = [os.path.abspath(path) for path in sys.path] + [str(root)]
    there = [path for path in dict.fromkeys(paths) if os.pathsep not in path]
    threads = dict.fromkeys(_ONE_THREAD, "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(there)}


atexit.register(close)
os.register_at_fork(after_in_child=_forget)
