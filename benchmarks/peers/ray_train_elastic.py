"""The peer: elastic data-parallel training with Ray Train on CPU, one thread a worker.

Two workers train the GPT of torch_pipelining.py with a checkpoint every five steps; after 22 steps
one of them is SIGKILLed. Prints JSON: seconds from the kill to the next step, `commit_s`, and to
the first step that had not been reached before it, `regained_s`. Public interfaces only; needs
ray[train].
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # elastic since then

import ray
import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

BENCHMARKS = Path(__file__).parents[1]
KILL_AFTER, STEPS, CHECKPOINT_EVERY = 22, 30, 5
BATCH = 8  # per worker
LIMIT_S = 180.0


def loop(config: dict[str, Any]) -> None:
    """One worker."""
    sys.path.insert(0, config["benchmarks"])
    from peers.torch_pipelining import BLOCKS, LENGTH, VOCAB, Block, Embed, Head, loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = train.get_context().get_world_rank()
    model = nn.Sequential(Embed(), *(Block() for _ in range(BLOCKS)), Head())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1
    parallel = train.torch.prepare_model(model)
    for step in range(start, config["steps"]):
        batch = torch.randint(0, VOCAB, (BATCH, LENGTH + 1))
        value = loss(parallel(batch[:, :-1].contiguous()), batch[:, 1:].contiguous())
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        line = {"time": time.time(), "step": step, "rank": rank, "pid": os.getpid()}
        with open(config["log"], "a") as file:
            file.write(json.dumps(line) + "\n")
        if step % CHECKPOINT_EVERY:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            saved = None
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, Path(scratch) / "state.pt")
                saved = Checkpoint.from_directory(scratch)
            train.report({"loss": float(value)}, checkpoint=saved)


def lines_of(log: Path) -> list[dict[str, Any]]:
    """What the workers have written, but for a line that is being written."""
    whole = log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def kill_one(log: Path, killed: list[float]) -> None:
    """SIGKILL the second worker once it has done enough steps."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(0.02)
        lines = [line for line in lines_of(log) if line["rank"] == 1]
        if lines and lines[-1]["step"] >= KILL_AFTER:
            killed.append(time.time())
            os.kill(lines[-1]["pid"], signal.SIGKILL)
            return


def recovery(lines: list[dict[str, Any]], at: float) -> dict[str, float]:
    """Ray Train restarts all workers: progress is what processes do that were not there before."""
    old = {line["pid"] for line in lines if line["time"] <= at}
    newest = max(line["step"] for line in lines if line["pid"] in old)
    after = [line for line in lines if line["pid"] not in old]
    regained = next(line for line in after if line["step"] > newest)
    return {"commit_s": after[0]["time"] - at, "regained_s": regained["time"] - at}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder")
    options = parser.parse_args()
    log = options.folder / "steps.jsonl"
    log.touch()
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    killed: list[float] = []
    threading.Thread(target=kill_one, args=(log, killed), daemon=True).start()
    # Ray's types know of elastic sizes only where RAY_TRAIN_V2_ENABLED is set.
    elastic: Any = (1, 2)
    TorchTrainer(
        loop,
        train_loop_config={"log": str(log), "benchmarks": str(BENCHMARKS), "steps": STEPS},
        scaling_config=ScalingConfig(num_workers=elastic),
        run_config=RunConfig(
            storage_path=str(options.folder / "storage"),
            name="peer",
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    print(json.dumps(recovery(lines_of(log), killed[0])))


if __name__ == "__main__":
    main()
