"""A process that decodes: `python -m elastic_trainer.data.media.decoder_process SOCKET NOTES`.

It takes chunks of samples from a socket and answers each chunk as a whole, so that whoever waits is
woken once. At which sample it is stands in its notes: they outlive it. It loads neither torch nor
Ray nor pyarrow.
"""

import os
import select
import signal
import socket
import sys
import threading
import traceback

# Ctrl-C goes to all processes of a terminal; whether to end is for the loader's to say.
signal.signal(signal.SIGINT, signal.SIG_IGN)

from elastic_trainer.data.media import decoding, wire  # noqa: E402
from elastic_trainer.data.media.notes import Notes  # noqa: E402

READY = "ready"


def main(descriptor: int, notes_descriptor: int) -> None:
    """Decode until the other end is closed."""
    notes = Notes(notes_descriptor)
    sock = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    _yield_like_parent()
    wire.send(sock, READY)
    while True:
        samples, limits = wire.receive(sock)
        answers = []
        for place, files in enumerate(samples):
            notes.begin(place)
            answers.append(_answer(files, limits))
        wire.send(sock, answers)


def _answer(files: decoding.Files, limits: decoding.Limits) -> decoding.Made | Exception:
    try:
        return decoding.make(files, limits)
    except Exception:  # a mistake of ours, or no memory; not every error can be sent
        return RuntimeError(traceback.format_exc())


def _end_with(descriptor: int) -> None:
    """End when the other end is closed, also while a codec hangs."""
    watch = select.poll()
    watch.register(descriptor, 0)  # nothing but the hang-up
    watch.poll()
    os._exit(0)


def _yield_like_parent() -> None:
    """Be as nice as the loader: threads have a niceness each, and one of them started this."""
    parent = os.getpriority(os.PRIO_PROCESS, os.getppid())
    if parent > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, parent)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except (EOFError, OSError):
        os._exit(0)  # nobody waits for an answer
