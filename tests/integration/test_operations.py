"""Running, watching and ending runs for real: signals, detached runs, killed and wedged processes,
a full disk, tokens, Ray jobs. Whatever happens, nothing is left running and nothing is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_trainer import RunResult, fit
from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.cli.main import run as command
from elastic_trainer.data.tokenizer import train_bpe
from elastic_trainer.errors import ClusterError
from elastic_trainer.observability.runs import read_events, read_status, read_updates

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

CLI = Path(sys.executable).parent / "elastic-trainer"
LIMIT_S = 90.0  # for whatever must happen at all; far above what a quiet machine needs
STEP_S = 0.02  # about one update of the tiny model

ACTORS = re.compile(r"ray::(StageWorker|Loader|Coordinator)")


class Cluster(Protocol):
    """What the fixture `ray_cluster` gives."""

    address: str
    dashboard: str
    folder: Path
    token: Path
    env: dict[str, str]


@pytest.fixture
def cluster(ray_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster; no actor of a run may be left on it."""
    yield ray_cluster
    wait_for(lambda: not actors_on(ray_cluster), f"no actor is left: {actors_on(ray_cluster)}")


def tiny(max_steps: int = 100_000, **sections: dict[str, Any]) -> dict[str, Any]:
    """Two stages that sleep a little; endless unless told otherwise."""
    args = {"num_layers": 2, "forward_s": STEP_S / 4, "backward_s": STEP_S / 4}
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "emulated", "args": {**args, "activation_bytes": 64}},
        "data": {"format": "synthetic", "sequence_length": 4},
        "train": {
            "global_batch_size": 4,
            "max_steps": max_steps,
            "eval_batches": 0,
            "max_grad_norm": 0.0,
        },
        "optim": {"name": "sgd", "lr_schedule": "constant"},
        "pipeline": {"microbatch_size": 2, "segment_updates": 2},
    }
    return {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}


def config_file(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return str(file)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = LIMIT_S) -> None:
    """Poll a condition; a failed test when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


def has_updates(run_dir: Path, count: int = 1) -> Callable[[], bool]:
    return lambda: len(read_updates(run_dir)) >= count


def worker_pids(run_dir: Path) -> dict[str, int]:
    """Process of each stage worker, from the run's story."""
    events = [e for e in read_events(run_dir) if e["kind"] == "worker"]
    return {e["worker"]: e["pid"] for e in events}


def all_pids(run_dir: Path) -> list[int]:
    """The coordinator's process and the stage workers'."""
    return [read_status(run_dir)["pid"], *worker_pids(run_dir).values()]


def processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Living processes: id, command line, environment at their start."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b") Z " not in (entry / "stat").read_bytes():
                yield (
                    int(entry.name),
                    (entry / "cmdline").read_bytes(),
                    (entry / "environ").read_bytes(),
                )
        except OSError:
            continue


def is_alive(pid: int) -> bool:
    return any(pid == other for other, _, _ in processes())


def actors_on(ray_cluster: Cluster) -> list[str]:
    """Actors of runs that are alive on the shared cluster."""
    mark = str(ray_cluster.folder).encode()
    commands = [line.decode(errors="replace") for _, line, env in processes() if mark in env]
    return [line for line in commands if ACTORS.search(line)]


def marked(mark: str) -> list[str]:
    """Living processes that descend from one started with `mark` in its environment."""
    return [line.decode(errors="replace") for _, line, env in processes() if mark.encode() in env]


def one_line(stderr: str) -> str:
    """The reason a command failed with: the only thing on its standard error."""
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("elastic-trainer: "), stderr
    assert "\x1b" not in lines[0]
    return lines[0]


def run_cli(
    arguments: list[str], env: dict[str, str], cwd: Path, timeout_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CLI), *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class Terminal:
    """A command on a terminal of its own, as a user has it: Ctrl-C reaches its whole group."""

    # The child makes the terminal its own before it becomes the command.
    SHIM = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(self, arguments: list[str], env: dict[str, str], cwd: Path) -> None:
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SHIM, str(CLI), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)
        self.output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while block := os.read(self._master, 65536):
                self.output += block
        except OSError:  # how Linux says that the other side is closed
            return

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(LIMIT_S)
        self._reader.join(5.0)
        os.close(self._master)


@pytest.fixture
def local_env(tmp_path: Path) -> dict[str, str]:
    """Environment without a cluster; `TEST_MARK` finds every process that comes of it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return env | {"TEST_MARK": str(tmp_path), "HOME": str(tmp_path)}


@pytest.fixture
def terminal(
    tmp_path: Path, local_env: dict[str, str]
) -> Iterator[Callable[[dict[str, Any]], Terminal]]:
    """Starts `train --address local` on a terminal, with the run folder `run`."""
    opened: list[Terminal] = []

    def start(config: dict[str, Any]) -> Terminal:
        file = config_file(tmp_path, config)
        run_dir = str(tmp_path / "run")
        arguments = ["train", file, "--address", "local", "--run-dir", run_dir]
        opened.append(Terminal(arguments, local_env, tmp_path))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
    for pid, _, env in processes():
        if str(tmp_path).encode() in env:
            os.kill(pid, signal.SIGKILL)


def nothing_left(mark: Path) -> None:
    wait_for(lambda: not marked(str(mark)), f"nothing is left: {marked(str(mark))}", 20.0)


def test_ctrl_c_stops_at_the_next_commit_point(
    terminal: Callable[[dict[str, Any]], Terminal], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shown = terminal(tiny())
    wait_for(has_updates(run_dir, 3), "three updates")
    shown.press_ctrl_c()
    assert shown.wait() == 0, shown.output.decode()
    nothing_left(tmp_path)
    text = shown.output.decode()
    assert "SIGINT: stopping at the next commit point" in text
    assert "--resume auto" in text, "how to go on is said"
    status = read_status(run_dir)
    assert (status["state"], status["reason"]) == ("stopped", "SIGINT received")
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.update == status["update"] == read_updates(run_dir)[-1]["update"]
    assert newest.update % 2 == 0, "segments of two updates end at even ones"


def test_ctrl_c_twice_stops_at_once(
    terminal: Callable[[dict[str, Any]], Terminal], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shown = terminal(tiny(pipeline={"microbatch_size": 2, "segment_updates": 100_000}))
    wait_for(
        lambda: run_dir.exists() and any(e["kind"] == "plan" for e in read_events(run_dir)), "plan"
    )
    wait_for(lambda: read_status(run_dir)["state"] == "running", "the endless segment")
    shown.press_ctrl_c()
    wait_for(lambda: b"stopping at the next commit point" in shown.output, "the first is taken")
    assert shown.process.poll() is None
    shown.press_ctrl_c()
    assert shown.wait(30.0) == 0, shown.output.decode()
    nothing_left(tmp_path)
    assert "stopped at once" in shown.output.decode()
    assert not read_status(run_dir)["alive"]


def test_sigterm_stops_at_the_next_commit_point(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", config_file(tmp_path, tiny()), "--address", cluster.address]
    process = subprocess.Popen(
        [str(CLI), *arguments, "--run-dir", str(run_dir)],
        env=cluster.env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(has_updates(run_dir), "an update")
        process.terminate()
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)
    assert process.returncode == 0, output
    assert read_status(run_dir)["reason"] == "SIGTERM received"
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None and newest.update == read_updates(run_dir)[-1]["update"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints; it must succeed."""
    assert command(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_detached_run(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, config = tmp_path / "runs", tiny(run={"name": "away"}, checkpoint={"every_steps": 4})
    run_dir = storage / "away"
    config["run"]["storage_path"] = str(storage)
    arguments = ["train", config_file(tmp_path, config), "--address", cluster.address, "--detach"]
    done = run_cli(arguments, cluster.env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run away goes on in the background" in done.stdout
    wait_for(lambda: read_status(run_dir).get("checkpoint_update"), "a checkpoint")

    shown = json.loads(printed(capsys, "status", str(run_dir), "--json"))
    assert shown["state"] == "running" and shown["alive"]
    assert "away" in printed(capsys, "runs", "--storage", str(storage))
    saved = json.loads(printed(capsys, "checkpoints", str(run_dir), "--json"))
    assert saved and saved[-1]["update"] % 4 == 0
    check_metrics(run_dir, shown["metrics_address"])

    stopped = run_cli(["stop", str(run_dir)], cluster.env, tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "away stops after its next commit point" in stopped.stdout
    wait_for(lambda: not read_status(run_dir)["alive"], "the end of the run")
    status = read_status(run_dir)
    assert (status["state"], status["reason"]) == ("stopped", "stop requested")
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None and newest.update == status["update"]
    assert json.loads((run_dir / "prometheus" / "targets.json").read_text()) == []
    again = run_cli(["stop", str(run_dir)], cluster.env, tmp_path)
    assert again.returncode == 1 and "away is not running: stopped" in one_line(again.stderr)
    wait_for(lambda: not marked(f"{run_dir}"), "the end of the detached process")


def check_metrics(run_dir: Path, address: str) -> None:
    """The target file points at the server, and its series carry the run's name and move."""
    targets = json.loads((run_dir / "prometheus" / "targets.json").read_text())
    assert targets[0]["targets"] == [address] and targets[0]["labels"]["run"] == "away"

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        ours = [line for line in lines if line.startswith("elastictrainer_")]
        assert ours and all('run="away"' in line for line in ours)
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in ours}

    counter = 'elastictrainer_updates_total{run="away"}'
    before = scrape()[counter]
    wait_for(lambda: scrape()[counter] > before, "the counter of updates goes up")
    stages = [s for s in scrape() if "stage=" in s]
    assert {m for s in stages for m in re.findall(r'stage="(\d+)"', s)} == {"0", "1"}


def in_background(work: Callable[[], None]) -> Future[None]:
    """Runs beside `fit`, which must have the main thread for nothing but itself."""
    future: Future[None] = Future()

    def body() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def train(cluster: Cluster, run_dir: Path, config: dict[str, Any], **options: Any) -> RunResult:
    return fit(config, address=cluster.address, run_dir=run_dir, display=False, **options)


def test_a_killed_stage_worker(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = tiny(checkpoint={"every_steps": 4})

    def kill() -> None:
        wait_for(lambda: read_status(run_dir).get("checkpoint_update"), "a checkpoint")
        os.kill(worker_pids(run_dir)["stage-1"], signal.SIGKILL)

    killed = in_background_after_start(run_dir, kill)
    result = train(cluster, run_dir, config)
    killed.result(0)
    assert result.status == "failed"
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None
    assert result.checkpoint == newest.path
    assert "\n" not in result.reason
    for part in ("stage-1 (stage 1", "SIGKILL", f"Last good checkpoint: update {newest.update}"):
        assert part in result.reason
    pids = worker_pids(run_dir).values()
    wait_for(lambda: not any(map(is_alive, pids)), "all actors are gone")

    config["train"]["max_steps"] = newest.update + 4
    resumed = train(cluster, run_dir, config, resume="auto")
    assert (resumed.status, resumed.update) == ("completed", newest.update + 4)
    numbers = [line["update"] for line in read_updates(run_dir)]
    assert numbers == list(range(1, newest.update + 5)), "no update is missing or done twice"


def in_background_after_start(
    run_dir: Path, work: Callable[[], None], num_workers: int = 2
) -> Future[None]:
    """`work`, once the run folder holds a run with all its workers."""

    def body() -> None:
        wait_for(lambda: len(worker_pids(run_dir)) == num_workers, "all workers")
        work()

    return in_background(body)


TROUBLE = '''
import torch
from torch import nn


class Scale(nn.Module):
    """Hands on what comes, times a weight of one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


class Trap(Scale):
    """NaN as soon as a sample is marked by a huge number."""

    def forward(self, x):
        return super().forward(torch.where(x > 1e8, torch.nan, x))


def trap():
    return [("first", Scale()), ("second", Scale()), ("trap", Trap()), ("head", nn.Linear(2, 1))]


def empty():
    return []
'''


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A user's model that yields NaN in update 13, and the data that makes it do so."""
    (tmp_path / "trouble_model.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [[float(i % 3), 1.0] for i in range(60)]
    rows[12 * 4 + 1] = [1e9, 1.0]  # the thirteenth batch of four
    table = pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "y": [1.0] * len(rows)})
    pq.write_table(table, str(tmp_path / "rows.parquet"))
    return {
        "model": {"target": "trouble_model:trap"},
        "data": {
            "path": str(tmp_path / "rows.parquet"),
            "format": "columns",
            "input_columns": ["x"],
            "label_columns": ["y"],
            "shuffle": False,
        },
        "train": {"global_batch_size": 4, "max_steps": 15, "eval_batches": 0},
        "pipeline": {"microbatch_size": 2, "segment_updates": 2, "cuts": [2]},
        "checkpoint": {"every_steps": 2},
    }


def test_a_loss_that_is_not_a_number(
    cluster: Cluster, tmp_path: Path, trouble: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    result = train(cluster, run_dir, trouble)
    assert (result.status, result.update) == ("failed", 12)
    assert [line["update"] for line in read_updates(run_dir)] == list(range(1, 13))
    store = CheckpointStore(run_dir / "checkpoints")
    newest = store.newest()
    assert newest is not None and newest.path == result.checkpoint
    assert "\n" not in result.reason
    named = (
        "NaN",
        "update 13",
        "'trap'",
        "stage 1",
        f"Last good checkpoint: update {newest.update}",
    )
    assert all(part in result.reason for part in named), result.reason
    for layer in ("first", "second", "trap", "head"):
        tensors = read_layer(store, store.manifest(newest.update), layer)
        assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())


def test_a_model_without_layers_is_named_by_the_workers(
    cluster: Cluster, tmp_path: Path, trouble: dict[str, Any]
) -> None:
    """On a cluster the model may exist on the nodes only: they refuse it, in the same words."""
    trouble["model"] = {"target": "trouble_model:empty"}
    trouble["pipeline"]["cuts"] = []
    result = train(cluster, tmp_path / "run", trouble)
    assert result.status == "failed"
    expected = "model.target trouble_model:empty returned no layers. Return at least one"
    assert result.reason == expected


def test_text_that_is_not_utf8(cluster: Cluster, tmp_path: Path) -> None:
    """Rows are read when their turn comes; the run then ends with the row's place."""
    good = pa.array([b"some text " * 20] * 7 + [b"caf\xe9"], pa.binary())
    rows = pa.Array.from_buffers(pa.string(), len(good), good.buffers())
    pq.write_table(pa.table({"text": rows}), str(tmp_path / "texts.parquet"))
    (tmp_path / "tokenizer.json").write_text(train_bpe(["some text"], 270).to_json())
    config = {
        "model": {"args": {"num_layers": 1, "dim": 8, "num_heads": 1}},
        "data": {"path": str(tmp_path / "texts.parquet"), "sequence_length": 8, "shuffle": False},
        "train": {"global_batch_size": 2, "max_steps": 100, "eval_batches": 0},
        "pipeline": {"microbatch_size": 2},
    }
    result = train(cluster, tmp_path / "run", config)
    assert result.status == "failed" and "\n" not in result.reason
    assert "not UTF-8" in result.reason and "row 7" in result.reason


def test_no_room(cluster: Cluster, tmp_path: Path) -> None:
    asked = {"num_workers": 2, "start_timeout_s": 1.0, "resources_per_worker": {"CPU": 1000}}
    result = train(cluster, tmp_path / "run", tiny(cluster=asked))
    assert result.status == "failed"
    assert re.search(
        r"no room for 2 workers after 1 s: asked for CPU 2000; there is CPU \S+ free of \d",
        result.reason,
    )
    assert "fewer --workers" in result.reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def fill(file: Path) -> None:
    """Leave no byte free."""
    with open(file, "wb", buffering=0) as out:
        for size in (65536, 1):
            try:
                while True:
                    out.write(bytes(size))
            except OSError:
                continue


@pytest.mark.parametrize("layout", ["checkpoints", "everything"])
def test_a_full_disk(cluster: Cluster, tmp_path: Path, small_disk: Path, layout: str) -> None:
    """Training goes on without a checkpoint, says so, and saves once there is room again."""
    run_dir = (tmp_path if layout == "checkpoints" else small_disk) / "run"
    filler = small_disk / "filler"
    config = tiny(max_steps=200, checkpoint={"every_steps": 10})
    if layout == "checkpoints":
        config["checkpoint"]["storage_path"] = str(small_disk / "saved")

    def trouble() -> None:
        wait_for(lambda: read_status(run_dir).get("checkpoint_update"), "a checkpoint")
        fill(filler)
        try:
            if layout == "checkpoints":
                wait_for(lambda: failures(run_dir), "a checkpoint that fails")
                count = len(read_updates(run_dir))
                wait_for(has_updates(run_dir, count + 4), "training goes on")
            else:
                address = read_status(run_dir)["metrics_address"]
                wait_for(lambda: scraped(address, "checkpoint_failures_total"), "a failure")
                before = scraped(address, "updates_total")
                wait_for(lambda: scraped(address, "updates_total") > before + 4, "going on")
        finally:
            filler.unlink()

    background = in_background_after_start(run_dir, trouble)
    result = train(cluster, run_dir, config)
    background.result(LIMIT_S)
    assert (result.status, result.update) == ("completed", 200)
    assert failures(run_dir), "it is in the run's story"
    assert "no space left" in failures(run_dir)[0]["message"]
    saved = [e["update"] for e in read_events(run_dir) if e["kind"] == "checkpoint"]
    assert saved[-1] == 200
    assert len(saved) > 1
    assert [line["update"] for line in read_updates(run_dir)] == list(range(1, 201))


def failures(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir) if e["kind"] == "checkpoint_failed"]


def scraped(address: str, name: str) -> float:
    """A counter of the run behind this metrics server."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        found = re.search(rf"^elastictrainer_{name}\S* (\S+)$", answer.read().decode(), re.M)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("token", ["wrong", "missing"])
def test_token(cluster: Cluster, tmp_path: Path, token: str) -> None:
    """Without the cluster's token nothing starts, and no token is printed."""
    file = tmp_path / "token"
    if token == "wrong":
        file.write_text("0123456789abcdef" * 4)
    env = cluster.env | {"RAY_AUTH_TOKEN_PATH": str(file), "HOME": str(tmp_path)}
    run_dir = str(tmp_path / "run")
    arguments = ["train", config_file(tmp_path, tiny()), "--address", cluster.address]
    done = run_cli([*arguments, "--run-dir", run_dir], env, tmp_path)
    assert done.returncode == 1, done.stdout
    reason = one_line(done.stderr)
    assert "token" in reason and "RAY_AUTH_TOKEN_PATH" in reason
    for secret in ("0123456789abcdef", cluster.token.read_text()):
        assert secret not in done.stdout + done.stderr
    assert not Path(run_dir).exists()


@pytest.mark.parametrize(("setting", "succeeds"), [("train.max_steps=4", True), ("oops=1", False)])
def test_inside_a_ray_job(cluster: Cluster, tmp_path: Path, setting: str, succeeds: bool) -> None:
    """The same command, without an address: the job's cluster is found, its status passed on."""
    run_dir = tmp_path / "run"
    ray = [str(CLI.parent / "ray"), "job", "submit", "--address", cluster.dashboard, "--"]
    train_it = [str(CLI), "train", config_file(tmp_path, tiny()), setting]
    done = subprocess.run(
        [*ray, *train_it, "--run-dir", str(run_dir)],
        env=cluster.env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    if succeeds:
        status = read_status(run_dir)
        assert (status["state"], status["update"]) == ("completed", 4)
        assert status["ray_address"].rpartition(":")[2] == cluster.address.rpartition(":")[2]
    else:
        assert "oops" in done.stdout
        assert not run_dir.exists()


def test_a_killed_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def kill() -> None:
        wait_for(has_updates(run_dir), "an update")
        os.kill(read_status(run_dir)["pid"], signal.SIGKILL)

    killed = in_background_after_start(run_dir, kill)
    with pytest.raises(ClusterError) as caught:
        train(cluster, run_dir, tiny())
    killed.result(0)
    assert "the run's coordinator died" in str(caught.value)
    assert "--resume auto" in str(caught.value) and "\n" not in str(caught.value)
    assert read_status(run_dir)["state"] == "interrupted"
    wait_for(lambda: not any(map(is_alive, all_pids(run_dir))), "all processes are gone")


@pytest.mark.parametrize("culprit", ["stage-1", "loader-0"])
def test_a_wedged_worker(cluster: Cluster, tmp_path: Path, culprit: str) -> None:
    """A process that stands still is found out by the limit on waiting, named, and ended."""
    run_dir, stopped_at = tmp_path / "run", 0.0

    def wedge() -> None:
        nonlocal stopped_at
        wait_for(has_updates(run_dir), "an update")
        pid = worker_pids(run_dir).get(culprit) or loader_pid(cluster)
        stopped_at = time.monotonic()
        os.kill(pid, signal.SIGSTOP)

    wedged = in_background_after_start(run_dir, wedge)
    result = train(cluster, run_dir, tiny(elastic={"stall_limit_s": 5.0}))
    took_s = time.monotonic() - stopped_at
    wedged.result(0)
    assert result.status == "failed"
    assert took_s < 5.0 + 15.0, "the limit, and a few seconds to clear away"
    told = rf"from {culprit}|worker {culprit}.* was lost .* has not answered for 5 s"
    assert re.search(told, result.reason.splitlines()[0])


def test_a_worker_wedged_while_nobody_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    """A stage without neighbours holds up no peer: only asking it tells."""
    run_dir = tmp_path / "run"
    args = {"num_layers": 1, "forward_s": STEP_S, "backward_s": STEP_S, "activation_bytes": 64}
    config = tiny(
        model={"name": "emulated", "args": args},
        cluster={"num_workers": 1},
        elastic={"stall_limit_s": 5.0},
    )

    def wedge() -> None:
        wait_for(has_updates(run_dir), "an update")
        os.kill(worker_pids(run_dir)["stage-0"], signal.SIGSTOP)

    wedged = in_background_after_start(run_dir, wedge, num_workers=1)
    result = train(cluster, run_dir, config)
    wedged.result(0)
    assert result.status == "failed"
    assert re.search(r"worker stage-0 \(stage 0.* was lost .* has not answered", result.reason)


def loader_pid(cluster: Cluster) -> int:
    """Process of the only loader on the cluster."""
    mark = str(cluster.folder).encode()
    found = [pid for pid, line, env in processes() if mark in env and b"ray::Loader" in line]
    assert len(found) == 1
    return found[0]
