"""Run by test_checkpoint_killed.py: saves checkpoints in processes that kill themselves.

killed_saver.py sweep ROOT    for each line that may change the disk, copy ROOT's checkpoint to
                              ROOT-<n> and be killed there while saving update 2 and pruning
killed_saver.py pause ROOT    save update 2, printing a line before each file and waiting
"""

import os
import shutil
import signal
import sys
from types import FrameType
from typing import Any

import torch

from elastic_trainer.checkpoint import storage
from elastic_trainer.checkpoint.layers import write_layer
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.types import Cursor

LAYERS = ("embed", "blocks.0", "head")
# Only these touch the disk: between other lines nothing can change there.
STORAGE = storage.__file__
CHANGING = ("Storage.write", "Storage._write", "Storage.delete", "_sync")


def save(store: CheckpointStore, update: int) -> None:
    files = [
        write_layer(store, update, index, name, {"param/w": torch.full((4,), float(update))})
        for index, name in enumerate(LAYERS)
    ]
    store.commit(update, files, cursor=Cursor(row=update))
    store.prune(1)


def kill_at_line(root: str, line: int) -> None:
    """Save in this process until `line` lines that may change the disk have run."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename != STORAGE or not code.co_qualname.startswith(CHANGING):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    store = CheckpointStore(root)
    sys.settrace(trace)
    save(store, 2)
    sys.settrace(None)


def sweep(root: str) -> None:
    save(CheckpointStore(root), 1)
    line = 0
    while True:
        copy = f"{root}-{line}"
        shutil.copytree(root, copy)
        child = os.fork()
        if not child:
            kill_at_line(copy, line)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{line} {status}\n")
        if status == 0:
            return
        assert status == -signal.SIGKILL, status
        line += 1


def pause(root: str) -> None:
    store = CheckpointStore(root)
    write = store.storage.write

    def slow(name: str, chunks: Any) -> None:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        write(name, chunks)

    store.storage.write = slow  # type: ignore[method-assign]
    save(store, 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"sweep": sweep, "pause": pause}[sys.argv[1]](sys.argv[2])
