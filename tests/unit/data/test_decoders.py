"""Processes that decode: they end with their parent, and what kills one costs no other sample."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.data.media import decoders
from elastic_trainer.data.media.audio import AudioLimits
from elastic_trainer.data.media.decoding import File, Files
from elastic_trainer.data.media.images import ImageLimits
from elastic_trainer.errors import DataError

LIMITS = (ImageLimits(), AudioLimits())
WAIT_S = 30.0


@pytest.fixture
def pool() -> Iterator[decoders.Decoders]:
    made = decoders.Decoders(2, 0)
    yield made
    made.close()


def bad(word: bytes) -> Files:
    return {"image": [File(word)]}


def same(mine: decoders.Result, theirs: decoders.Result) -> bool:
    if isinstance(mine, DataError) or isinstance(theirs, DataError):
        return type(mine) is type(theirs) and str(mine) == str(theirs)
    arrays = [[*(a for p in made[0] for a in p), *made[1]] for made in (mine, theirs)]
    return len(arrays[0]) == len(arrays[1]) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(*arrays, strict=True)
    )


def sockets(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    links = [os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "in vain"
        pause.wait(0.02)


def test_what_comes_back_is_what_is_made_here(
    pool: decoders.Decoders, files: Callable[[int], Files]
) -> None:
    samples = [files(n) for n in range(6)]
    samples += [bad(b""), bad(b"junk"), {"image": [File(None, "a.png")]}, {}, {"audio": []}]
    samples += [{"image": [File(b"x")] * 600}]  # many parts of one message
    here = decoders.Decoders(0, 0).decode(samples, LIMITS, WAIT_S)
    there = pool.decode(samples, LIMITS, WAIT_S)
    assert all(same(a, b) for a, b in zip(here, there, strict=True))
    assert [type(result) for result in there[6:9]] == [DataError] * 3
    assert not isinstance(there[0], DataError)
    patches = there[0][0][0][0]
    patches[0] = 1  # what is not kept may be written to, as what is made here
    many: Files = {"image": [*files(1)["image"]] * 700}
    (one,) = pool.decode([many], LIMITS, WAIT_S)
    assert not isinstance(one, DataError) and len(one[0]) == 700


def test_a_decoder_loads_little_and_soon(pool: decoders.Decoders) -> None:
    code = (
        "import sys, elastic_trainer.data.media.decoder_process as d;"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=decoders._environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "numpy" in found and "elastic_trainer" in found
    assert not {"torch", "ray", "pyarrow", "omegaconf", "scipy", "tokenizers", "PIL"} & {*found}
    pool.decode([{"image": [], "audio": []}], LIMITS, WAIT_S)
    (decoder,) = pool._all
    of_it = Path(f"/proc/{decoder._process.pid}")
    ticks = (of_it / "stat").read_text().rpartition(")")[2].split()[11:13]
    assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 0.5  # seconds of a processor
    environment = (of_it / "environ").read_text().split("\0")
    assert {f"{name}_NUM_THREADS=1" for name in ("OMP", "MKL", "OPENBLAS")} <= {*environment}


def test_decoders_are_started_once_and_ignore_ctrl_c(
    pool: decoders.Decoders, files: Callable[[int], Files]
) -> None:
    assert not pool._all, "nothing is started before the first use"
    pool.decode([files(0)], LIMITS, WAIT_S)
    (before,) = pool._all
    os.kill(before._process.pid, signal.SIGINT)
    for _ in range(3):
        pool.decode([files(0)], LIMITS, WAIT_S)
    assert pool._all == {before} and before._process.poll() is None


@pytest.mark.parametrize("places", [(0,), (2,), (5,), (1, 2), (0, 1, 2, 3, 4, 5)])
def test_only_the_sample_that_kills_is_lost(
    pool: decoders.Decoders,
    deadly: None,
    files: Callable[[int], Files],
    places: tuple[int, ...],
) -> None:
    samples = [bad(b"segfault") if n in places else files(n) for n in range(6)]
    found = pool.decode(samples, LIMITS, WAIT_S)
    here = decoders.Decoders(0, 0).decode([files(n) for n in range(6)], LIMITS, WAIT_S)
    for place, result in enumerate(found):
        if place in places:
            assert isinstance(result, DataError)
            assert result.what == "the decoder died of signal 11 (SIGSEGV) on it"
            assert "data.on_error=skip" in result.hint
        else:
            assert same(result, here[place])
    assert len(pool._all) <= 1


def test_a_decoder_that_dies_of_something_else_costs_nothing(
    pool: decoders.Decoders,
    deadly: None,
    files: Callable[[int], Files],
    picture: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    once = {**files(2), "image": [File(f"once {tmp_path / 'mark'}".encode())]}
    samples = [files(0), files(1), once, files(3)]
    found = pool.decode(samples, LIMITS, WAIT_S)
    samples[2] = {**files(2), "image": [File(picture())]}
    here = decoders.Decoders(0, 0).decode(samples, LIMITS, WAIT_S)
    assert (tmp_path / "mark").exists()
    assert all(same(a, b) for a, b in zip(found, here, strict=True))
    (idle,) = pool._all  # and one that was killed while it had nothing to do
    os.kill(idle._process.pid, signal.SIGKILL)
    again = pool.decode(samples, LIMITS, WAIT_S)
    assert all(same(a, b) for a, b in zip(again, here, strict=True))


def test_a_decoder_that_hangs_or_exits_is_told_so(
    pool: decoders.Decoders, deadly: None, files: Callable[[int], Files]
) -> None:
    pool.decode([files(0)], LIMITS, WAIT_S)  # everything is loaded
    first, second, third = pool.decode([bad(b"hang"), bad(b"exit"), files(0)], LIMITS, 1.0)
    assert isinstance(first, DataError) and isinstance(second, DataError)
    assert first.what == "the decoder did not answer within 1 s on it"
    assert second.what == "the decoder ended with exit status 3 on it"
    assert not isinstance(third, DataError)


def test_slow_samples_have_their_time_each(pool: decoders.Decoders, deadly: None) -> None:
    found = pool.decode([bad(b"slow 1.2")] * 3, LIMITS, 3.0)
    assert [type(result) for result in found] == [tuple] * 3
    assert len(pool._all) == 1, "none was lost"


def test_a_mistake_of_ours_is_not_blamed_on_the_data(
    pool: decoders.Decoders, deadly: None, files: Callable[[int], Files]
) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a mistake of ours"):
        pool.decode([files(0), bad(b"mistake")], LIMITS, WAIT_S)
    assert not pool._all
    assert len(pool.decode([files(0)], LIMITS, WAIT_S)) == 1


@pytest.mark.parametrize(
    "command, told",
    [
        ([sys.executable, "-c", "raise SystemExit(7)"], "it ended with exit status 7"),
        (["/no/such/program"], "No such file"),
    ],
)
def test_a_decoder_that_cannot_be_started_is_named(
    pool: decoders.Decoders, monkeypatch: pytest.MonkeyPatch, command: list[str], told: str
) -> None:
    monkeypatch.setattr(decoders, "COMMAND", command)
    before = sockets(os.getpid())
    with pytest.raises(DataError, match=f"cannot be started: .*{told}.*media_workers=0"):
        pool.decode([bad(b"x")], LIMITS, WAIT_S)
    assert sockets(os.getpid()) == before and not pool._all


def test_nothing_is_left_after_close(files: Callable[[int], Files], deadly: None) -> None:
    before = sockets(os.getpid()), threading.active_count()
    pool = decoders.Decoders(2, 0)
    waiting = [pool.submit(pool.decode, [bad(b"hang")], LIMITS, WAIT_S) for _ in range(4)]
    wait_until(lambda: len(pool._all) == 2)
    processes = [each._process for each in list(pool._all)]
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < WAIT_S / 2, "nobody waits for a decoder that hangs"
    assert all(each.done() for each in waiting)
    assert all(process.returncode is not None for process in processes)
    assert (sockets(os.getpid()), threading.active_count()) == before
    pool.close()


def test_the_last_who_holds_them_ends_them(files: Callable[[int], Files]) -> None:
    class Holder:
        pass

    first, second = Holder(), Holder()
    decoders.hold(first)
    decoders.hold(second)
    pool = decoders.shared(1, 0)
    assert decoders.shared(1, 0) is pool
    pool.decode([files(0)], LIMITS, WAIT_S)
    decoders.release(first)
    decoders.release(first)
    assert len(pool.decode([files(0)], LIMITS, WAIT_S)) == 1
    decoders.release(second)
    assert not pool._all and decoders.shared(1, 0) is not pool
    with decoders.kept():
        pool = decoders.shared(1, 0)
        pool.decode([files(0)], LIMITS, WAIT_S)
        assert pool._all
    assert not pool._all


PARENT = """
import os, sys, threading
from elastic_trainer.data.media import decoders
from elastic_trainer.data.media.audio import AudioLimits
from elastic_trainer.data.media.decoding import File
from elastic_trainer.data.media.images import ImageLimits
how, helper, *marks = sys.argv[1:]
decoders.COMMAND = (sys.executable, helper)
pool = decoders.shared(2, 0)
for decoder in [decoders._Decoder(), decoders._Decoder()]:
    pool._all.add(decoder)
    pool._idle.append(decoder)
if how == "fork" and not os.fork():
    sys.stdin.read()  # a copy of the parent that outlives it
    os._exit(0)
for mark in marks if how == "busy" else ():
    sample = {"image": [File(f"hang {mark}".encode())]}
    pool.submit(pool.decode, [sample], (ImageLimits(), AudioLimits()), 60.0)
    while not os.path.exists(mark):
        threading.Event().wait(0.01)
print(*(each._process.pid for each in pool._all), flush=True)
if how != "ends":
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["idle", "busy", "fork", "ends"])
def test_decoders_end_with_their_parent(tmp_path: Path, deadly_decoder: Path, how: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    marks = [tmp_path / "first", tmp_path / "second"]
    with subprocess.Popen(
        [sys.executable, *map(str, (script, how, deadly_decoder, *marks))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=decoders._environment(),
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if how != "ends":
            assert all(alive(pid) for pid in pids)
            parent.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_modules_are_found_where_the_parent_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shipped.py").write_text("print('here')")
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import shipped"],
        env=decoders._environment(),
        capture_output=True,
        text=True,
    )
    assert found.stdout == "here\n"
