"""Big blocks of memory are used again without a page fault, until they are given back."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import torch
from elastic_trainer.actors import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1])

def use():
    for _ in range(4):
        [torch.ones(2 << 20) for _ in range(12)]  # 8 MiB each
    begin = faults()
    for _ in range(12):
        [torch.ones(2 << 20) for _ in range(12)]
    found.append(faults() - begin)

found = []
if sys.argv[1] == "keep":
    assert heap.keep("cpu") and not heap.keep("cuda")
thread = threading.Thread(target=use)
thread.start(), thread.join()
kept = resident()
heap.give_back()
print(found[0], kept - resident())
"""
PAGES = 24 << 10  # of one round's blocks


def run(mode: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    faults, returned = map(int, done.stdout.split())
    return faults, returned


@pytest.mark.skipif(sys.platform != "linux", reason="the C library may be another one")
def test_blocks_are_used_again_and_given_back_at_the_end() -> None:
    faults, returned = run("keep")
    assert faults < 500, "of the 300 000 pages that twelve rounds use"
    assert returned > PAGES / 4
    assert run("leave")[0] > 5000, "what this is for"
