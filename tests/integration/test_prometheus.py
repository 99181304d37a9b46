"""A real Prometheus reads what we write: target files, /metrics, alerts.

The server is Debian's. Where it is not installed its package is unpacked into a cache, without
installing anything; where there is no apt, these tests skip.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.observability.changes import Change
from elastic_trainer.observability.dashboard import dashboard
from elastic_trainer.observability.metrics import RunMetrics
from elastic_trainer.observability.record import TARGETS_FILE
from elastic_trainer.observability.series import CATALOG
from elastic_trainer.observability.targets import clear_targets, write_targets
from elastic_trainer.types import CheckpointInfo, Plan, Prediction, StagePlan, StageReport

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "prometheus"
CACHE = Path.home() / ".cache" / "elastic-trainer" / "tools"
DOWNLOAD_S = 60
DEADLINE_S = 40.0


def find_tool(name: str, package: str) -> str:
    """Path of a program: installed, or unpacked from its Debian package into a cache.

    Nothing is installed: `apt-get download` fetches the package, `dpkg -x` unpacks it. Skips the
    test where neither can be.
    """
    installed = shutil.which(name)
    if installed:
        return installed
    unpacked = CACHE / package
    if not (unpacked / "usr" / "bin" / name).exists():
        _unpack(name, package, unpacked)
    return str(unpacked / "usr" / "bin" / name)


def _unpack(name: str, package: str, target: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip(f"{name} is not installed, and there is no apt to fetch it with")
    work = CACHE / f".{package}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        done = subprocess.run(
            ["apt-get", "download", package],
            cwd=work,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
        )
        debs = list(work.glob("*.deb"))
        if done.returncode or not debs:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"{name} is not installed, and apt-get download {package} says: {reason}")
        subprocess.run(["dpkg", "-x", str(debs[0]), str(work / "tree")], check=True, timeout=60)
        if not target.exists():
            os.replace(work / "tree", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@pytest.fixture(scope="module")
def promtool() -> str:
    return find_tool("promtool", "prometheus")


def make_metrics(run: str, num_stages: int = 2) -> RunMetrics:
    """Metrics with a value in every series that a run can have."""
    metrics = RunMetrics(run, version="1.2.3")
    stages = range(num_stages)
    plan = Plan(
        generation=1,
        schedule="1f1b",
        num_microbatches=4,
        layers=tuple(f"layers.{s}" for s in stages),
        stages=tuple(StagePlan(stage=s, first=s, stop=s + 1, worker=f"stage-{s}") for s in stages),
        predicted=Prediction(
            step_s=0.5,
            bubble_ratio=0.2,
            stage_busy_s=(0.4,) * num_stages,
            stage_memory_bytes=(1,) * num_stages,
        ),
        reasons=(),
    )
    metrics.observe_plan(plan, 100)
    phases = ("forward", "backward", "optimizer", "send", "recv", "idle")
    metrics.observe_segment(
        StageReport(
            stage=s,
            worker=f"stage-{s}",
            generation=1,
            segment=1,
            updates=(),
            busy_s=dict.fromkeys(phases, 0.1),
            wall_s=1.0,
            peak_live_activations=2,
            peak_activation_bytes=4096,
            stash_copies=0,
            max_staleness=0,
            sent_bytes=10,
            received_bytes=10,
        )
        for s in stages
    )
    line = {"update": 1, "loss": 3.5, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.5, "skipped": True}
    metrics.observe_update(line | {"samples": 4, "tokens": 32, "tokens_per_s": 64.0})
    metrics.observe_evaluation(3.25)
    metrics.observe_checkpoint(
        CheckpointInfo(update=1, path="p", num_bytes=10, created_at=time.time()), 0.2
    )
    metrics.observe_checkpoint_failure()
    metrics.observe_workers({"pending": 1, "running": num_stages})
    metrics.observe_loaders({"serving": 1})
    metrics.observe_leases(3.0, dict.fromkeys(stages, 0.5))
    metrics.observe_budgets({"failures": 2, "preemptions": None})
    metrics.observe_waiting(False)
    metrics.observe_snapshot(1, 0.01)
    loss = Change(
        time=time.time(),
        cause="crashed",
        reason="killed",
        update=1,
        workers_before=num_stages,
        workers_after=num_stages,
        worker="stage-9",
        node="10.0.0.9",
    )
    metrics.observe_change(loss)
    metrics.observe_moved({"own": 10, "peer": 5, "snapshot": 3, "storage": 0}, 0.5)
    metrics.observe_recovery(1.5, 3, 96)
    return metrics


def test_every_metric_has_a_value_here() -> None:
    text = make_metrics("r").text()
    empty = [
        s.full_name for s in CATALOG if f"# TYPE {s.full_name.removesuffix('_total')}" not in text
    ]
    assert empty == ["elastictrainer_stage_queue_depth"], "which lasts as long as a segment"


class Server:
    """A running Prometheus."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> dict[str, float]:
        """Value of each series, by its labels as text."""
        result = self.get("/api/v1/query", query=expression)["result"]
        return {json.dumps(s["metric"], sort_keys=True): float(s["value"][1]) for s in result}

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if condition():
                    return
            except (urllib.error.URLError, ConnectionError):
                pass  # it is still starting
            assert self._process.poll() is None, f"Prometheus ended: {self._log.read_text()}"
            assert time.monotonic() < deadline, f"no {what} after {DEADLINE_S} s"
            time.sleep(0.1)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with `configs/prometheus` as shipped, only faster, and no runs yet."""
    folder = tmp_path / "configs" / "prometheus"
    shutil.copytree(CONFIGS, folder)
    text = (folder / "prometheus.yml").read_text(encoding="utf-8")
    faster = text.replace("scrape_interval: 5s", "scrape_interval: 250ms")
    faster = faster.replace("refresh_interval: 10s", "refresh_interval: 250ms")
    faster = faster.replace("/tmp/ray/", str(tmp_path) + "/")
    assert faster != text
    (folder / "prometheus.yml").write_text(faster, encoding="utf-8")
    (tmp_path / "runs" / "prometheus").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def server(workplace: Path) -> Iterator[Server]:
    program = find_tool("prometheus", "prometheus")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = workplace / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={workplace}/configs/prometheus/prometheus.yml",
                f"--storage.tsdb.path={workplace}/tsdb",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=out,
        )
        try:
            yield Server(port, process, log)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def check(program: str, *arguments: str, stdin: str | None = None) -> None:
    done = subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_our_metrics(promtool: str) -> None:
    text = make_metrics("r").text()
    assert text.count("# TYPE") > 25
    check(promtool, "check", "metrics", stdin=text)


def test_promtool_finds_fault_with_bad_metrics(promtool: str) -> None:
    with pytest.raises(AssertionError, match="counter metrics should have"):
        check(promtool, "check", "metrics", stdin="# HELP x y\n# TYPE x counter\nx 1\n")


def test_promtool_accepts_the_configuration(promtool: str, workplace: Path) -> None:
    check(promtool, "check", "config", str(CONFIGS / "prometheus.yml"))
    check(promtool, "check", "rules", str(CONFIGS / "alerts.yml"))


def test_alerts_fire_when_they_should_and_only_then(promtool: str, tmp_path: Path) -> None:
    text = (Path(__file__).parent / "alerts_test.yml").read_text(encoding="utf-8")
    test_file = tmp_path / "alerts_test.yml"
    test_file.write_text(text.replace("ALERTS", str(CONFIGS / "alerts.yml")), encoding="utf-8")
    check(promtool, "test", "rules", str(test_file))


def test_runs_are_found_scraped_and_forgotten(server: Server, workplace: Path) -> None:
    metrics = make_metrics("first")
    targets = workplace / "runs" / "first" / TARGETS_FILE
    try:
        write_targets(targets, metrics.serve("127.0.0.1", 0), "first")
        server.wait_until(lambda: bool(server.query("elastictrainer_loss")), "loss")
        assert set(server.query('up{job="elastic-trainer",run="first"}').values()) == {1.0}
        exported = {
            line.split("{")[0] for line in metrics.text().splitlines() if not line.startswith("#")
        }
        scraped = set(server.get("/api/v1/label/__name__/values"))
        assert exported <= scraped
        for series in server.query('{__name__=~"elastictrainer_.*"}'):
            labels = json.loads(series)
            assert labels["run"] == "first" and "exported_run" not in labels
        for panel in dashboard()["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$run", ".*")
                server.query(expression.replace("$__rate_interval", "1m"))
        clear_targets(targets)
        server.wait_until(lambda: not server.query("elastictrainer_loss"), "end of the series")
    finally:
        metrics.close()


def test_series_of_departed_stages_end_with_the_next_scrape(
    server: Server, workplace: Path
) -> None:
    metrics = make_metrics("first", num_stages=3)
    try:
        address = metrics.serve("127.0.0.1", 0)
        write_targets(workplace / "runs" / "first" / TARGETS_FILE, address, "first")
        stage = 'elastictrainer_stage_busy_seconds_total{stage="2"}'
        lease = 'elastictrainer_stage_lease_age_seconds{stage="2"}'
        server.wait_until(lambda: len(server.query(stage)) == 6, "third stage")
        assert server.query(lease)
        metrics.observe_departed([2])
        server.wait_until(lambda: not server.query(lease), "end of the lost worker's gauges")
        assert server.query(stage), "its counters go on with whoever takes its place"
        metrics.observe_plan(
            Plan(
                generation=2,
                schedule="1f1b",
                num_microbatches=4,
                layers=("layers.0",),
                stages=(StagePlan(stage=0, first=0, stop=1, worker="stage-0"),),
                predicted=Prediction(
                    step_s=1.0, bubble_ratio=0.0, stage_busy_s=(1.0,), stage_memory_bytes=(1,)
                ),
                reasons=(),
            )
        )
        server.wait_until(lambda: not server.query(stage), "end of the third stage's series")
        assert server.query('elastictrainer_stage_busy_seconds_total{stage="0"}')
    finally:
        metrics.close()
