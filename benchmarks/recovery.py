"""How long training is held up when workers die, vanish, join and leave.

Four stages under 1F1B on one machine: real actors, real channels, real state. Kills, joining,
leaving and snapshots are measured with the GPT of vs_torch_pipelining.py, since its state has to
move, at 16 sequences a batch as in the peer. The host off the network holds emulated layers: five
hosts beside each other are enough for a small machine, and nothing is in the figure but detecting,
planning and a step.
"""

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import arguments, figure, log, show
from emulation import emulated
from live import LiveRun
from timeline import pause_s, recovery
from vs_torch_pipelining import config

from elastic_trainer.testing.host_lab import HostLab, HostLabUnavailable

PEER = Path(__file__).parent / "peers" / "ray_train_elastic.py"
PEER_S = 240.0
NUM_STAGES = 4
BATCH = 16  # sequences per update
SETTLED = 6  # updates before something happens
USUAL = 4  # updates after a pause that tell how long one usually takes
LATER_S = 0.2
SNAPSHOT_S = 20.0  # at least, in which snapshots are counted

Samples = dict[str, list[float]]


def gpt(**elastic: Any) -> dict[str, Any]:
    base = config(NUM_STAGES)
    base["train"] |= {"global_batch_size": BATCH, "max_steps": 1_000_000, "eval_batches": 0}
    return base | {"elastic": elastic}


def kill(folder: Path, workers: str, spares: int, stage: int) -> tuple[float, float]:
    """SIGKILL one of four workers in the middle of a segment; seconds to commit, to regain."""
    with LiveRun(folder, gpt(num_spares=spares), workers) as run:
        run.ready(NUM_STAGES, spares)
        run.updates(SETTLED)
        time.sleep(LATER_S * (1 + stage))  # a commit was seen just now; not always as early as that
        at = run.kill(stage)
        found = run.wait_for("recovery", lambda: recovery(run.commits, at))
        run.log_changes()
    return found.commit_s, found.regained_s


def kills(folder: Path, repeat: int) -> Samples:
    commit_s, regained_s = kill(folder, "3:4", 0, repeat % NUM_STAGES)
    return {"kill_to_commit_s": [commit_s], "kill_to_regained_s": [regained_s]}


def spares(folder: Path, repeat: int) -> Samples:
    commit_s, _ = kill(folder, "4", 1, repeat % NUM_STAGES)
    return {"kill_to_commit_spare_s": [commit_s]}


def peer(folder: Path, _repeat: int) -> Samples:
    """Ray Train, for the ratio with the kill just before or after."""
    if importlib.util.find_spec("pandas") is None:
        log("ray_train_over_ours left out: Ray Train is not installed (`pip install ray[train]`)")
        return {}
    command = [sys.executable, str(PEER), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_S, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "ray_train_commit_s": [found["commit_s"]],
        "ray_train_regained_s": [found["regained_s"]],
    }


def pauses(folder: Path, _repeat: int) -> Samples:
    """One of four workers leaves by request, and another one joins."""
    samples: Samples = {}
    with LiveRun(folder, gpt(), "4") as run:
        run.ready(NUM_STAGES)
        for name, workers in (("leave_pause_s", "3"), ("join_pause_s", "4")):
            samples[name] = [pause(run, workers)]
        run.log_changes()
    return samples


def pause(run: LiveRun, workers: str) -> float:
    run.updates(SETTLED)
    since = run.commits[-1].time
    run.command("scale", "--workers", workers)
    return run.wait_for(f"{workers} workers", lambda: pause_s(run.commits, since, USUAL))


def snapshots(folder: Path, _repeat: int) -> Samples:
    """The share of time in which stages stand still for snapshots, as the run counts it."""
    name = "elastictrainer_snapshot_seconds_total"
    with LiveRun(folder, gpt(), "4") as run:
        run.ready(NUM_STAGES)
        run.updates(SETTLED)
        first, cost_s = run.commits[-1], run.counter(name)
        run.wait_for("time", lambda: run.commits[-1].time - first.time > SNAPSHOT_S)
        cost_s = run.counter(name) - cost_s
        return {"snapshot_share": [cost_s / (run.commits[-1].time - first.time)]}


def partition(lab: HostLab, folder: Path) -> Samples:
    """Pull the cable of a host whose worker holds a stage."""
    model = emulated("1f1b", 8, 8, 0.005, 0.01, 1_000_000, cuts=[])
    model["train"]["eval_batches"] = 0
    model["cluster"] = {"num_workers": NUM_STAGES, "resources_per_worker": {"stage": 1}}
    with LiveRun(folder, model, "3:4", lab) as run:
        run.ready(NUM_STAGES)
        run.updates(SETTLED)
        at, host = run.cut_off(lab, stage=1)
        found = run.wait_for("recovery", lambda: recovery(run.commits, at))
        run.log_changes()
    lab.link_up(host)  # so that Ray notices at once what comes next
    lab.kill_host(host)
    return {"partition_to_commit_s": [found.commit_s]}


PARTS: Mapping[str, Callable[[Path, int], Samples]] = {
    "kills": kills,
    "peer": peer,
    "spares": spares,
    "pauses": pauses,
    "snapshots": snapshots,
}
PARTS_OF = {
    "kill_to_commit_s": ("kills",),
    "kill_to_regained_s": ("kills",),
    "ray_train_over_ours": ("kills", "peer"),
    "kill_to_commit_spare_s": ("spares",),
    "join_pause_s": ("pauses",),
    "leave_pause_s": ("pauses",),
    "snapshot_share": ("snapshots",),
    "partition_to_commit_s": (),
}


def partitions(repeats: int) -> Samples:
    """All in one lab: it takes its time to start, and a host that is lost is replaced."""
    samples: Samples = {}
    try:
        with HostLab(NUM_STAGES, resources={"stage": 1}) as lab:
            for repeat in range(repeats):
                if repeat:
                    lab.add_host()
                with tempfile.TemporaryDirectory(prefix="et-bench-") as folder:
                    add(samples, partition(lab, Path(folder)))
    except HostLabUnavailable as error:
        log(f"partition_to_commit_s left out: {error}")
    return samples


def add(samples: Samples, found: Samples) -> None:
    for name, values in found.items():
        samples.setdefault(name, []).extend(values)
        log(f"{name} {', '.join(f'{value:.3g}' for value in values)}")


def measure(names: list[str], repeats: int, failed: list[str]) -> Samples:
    """Samples of these figures; the parts take turns, and so does who goes first.

    A part that fails is noted in `failed`, and costs the others nothing.
    """
    parts = [part for part in PARTS if any(part in PARTS_OF[name] for name in names)]
    samples: Samples = {}
    for repeat in range(repeats):
        for part in parts if repeat % 2 == 0 else reversed(parts):
            with tempfile.TemporaryDirectory(prefix="et-bench-") as folder:
                try:
                    add(samples, PARTS[part](Path(folder), repeat))
                except (RuntimeError, subprocess.SubprocessError) as error:
                    failed.append(f"{part}, repeat {repeat}: {error}")
                    log(failed[-1])
    if "partition_to_commit_s" in names:
        try:
            samples |= partitions(repeats)
        except (RuntimeError, subprocess.SubprocessError) as error:
            failed.append(f"partition: {error}")
            log(failed[-1])
    return samples


def main() -> None:
    # So that a run is ended with the benchmark, whose next figures it would spoil otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = arguments(__doc__ or "", names=list(PARTS_OF))
    failed: list[str] = []
    samples = measure(options.only, options.repeats, failed)
    units = {"snapshot_share": "ratio"}
    figures = {name: figure(s, units.get(name, "s")) for name, s in samples.items()}
    theirs, ours = samples.get("ray_train_commit_s", []), samples.get("kill_to_commit_s", [])
    if theirs and len(theirs) == len(ours):  # else a part failed, and there are no pairs
        ratios = [peer_s / our_s for peer_s, our_s in zip(theirs, ours, strict=True)]
        figures["ray_train_over_ours"] = figure(ratios)
    show(figures, options.json, failed=failed)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
