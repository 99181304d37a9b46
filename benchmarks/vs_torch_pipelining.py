"""Tokens/s of our 1F1B over that of torch.distributed.pipelining: same model, same machine,
alternating runs, one compute thread a stage. Ours pays for Ray, ZeroMQ and the coordinator."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from common import arguments, figure, log, median_step_s, show, train

PEER = Path(__file__).parent / "peers" / "torch_pipelining.py"
PEER_CUTS = {2: "0,5,10", 4: "0,3,5,7,10"}
STEPS, WARMUP = 14, 4
BATCH, LENGTH = 32, 128


def config(num_stages: int) -> dict[str, Any]:
    """The peer's model and batch."""
    return {
        "model": {
            "name": "gpt",
            "args": {
                "vocab_size": 256,
                "dim": 256,
                "num_layers": 8,
                "num_heads": 4,
                "max_positions": LENGTH,
                "tie_embeddings": False,
                "gelu": "exact",
            },
        },
        "data": {"format": "synthetic", "sequence_length": LENGTH},
        "train": {"global_batch_size": BATCH, "max_steps": STEPS, "max_grad_norm": 0.0},
        "optim": {"name": "adamw", "learning_rate": 1e-3, "lr_schedule": "constant"},
        "pipeline": {"schedule": "1f1b", "microbatch_size": 4},
        "cluster": {"address": "local", "num_workers": num_stages},
        # As in the peer: nothing is checked for NaN.
        "numerics": {"check_finite": False},
    }


def ours(num_stages: int) -> float:
    return BATCH * LENGTH / median_step_s(train(config(num_stages)).lines, WARMUP)


def peer(num_stages: int, port: int) -> float:
    command = [sys.executable, str(PEER), "--cuts", PEER_CUTS[num_stages], "--port", str(port)]
    done = subprocess.run(
        [*command, "--steps", str(STEPS)], capture_output=True, text=True, timeout=600, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    options = arguments(__doc__ or "")
    ratios: dict[int, list[float]] = {2: [], 4: []}
    speeds: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for num_stages in (2, 4):
            port = 29600 + 10 * repeat + num_stages
            # Who goes first alternates too.
            if repeat % 2:
                mine, theirs = ours(num_stages), peer(num_stages, port)
            else:
                theirs, mine = peer(num_stages, port), ours(num_stages)
            ratios[num_stages].append(mine / theirs)
            speeds.setdefault(f"onef1b_p{num_stages}_tokens_per_s", []).append(mine)
            speeds.setdefault(f"torch_p{num_stages}_tokens_per_s", []).append(theirs)
            log(f"P={num_stages}: ours {mine:.0f}, torch {theirs:.0f} tokens/s")
    figures = {f"onef1b_p{p}_over_torch": figure(r) for p, r in ratios.items()}
    figures |= {name: figure(samples, "tokens/s") for name, samples in speeds.items()}
    show(figures, options.json)


if __name__ == "__main__":
    main()
