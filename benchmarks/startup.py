"""From the command to the first committed step, in local mode, the dataset being there and no
profile being cached."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments, figure, log, show

LIMIT_S = 120.0


def cli(*words: str) -> list[str]:
    return [sys.executable, "-m", "elastic_trainer.cli", *words]


def first_step_s(scratch: Path, dataset: Path, repeat: int) -> float:
    run_dir = scratch / f"run{repeat}"
    environment = os.environ | {"XDG_CACHE_HOME": str(scratch / f"cache{repeat}")}
    begin = time.time()
    subprocess.run(
        cli(
            "train",
            "gpt",
            f"data.path={dataset}",
            "train.max_steps=1",
            "train.eval_batches=0",
            "train.eval_steps=0",
            "--address",
            "local",
            "--run-dir",
            str(run_dir),
        ),
        env=environment,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=True,
    )
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    return float(line["time"]) - begin


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory(prefix="et-bench-") as folder:
        scratch = Path(folder)
        dataset = scratch / "stdlib-text"
        subprocess.run(
            cli("make-dataset", "stdlib-text", "--out", str(dataset)),
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )
        samples = []
        for repeat in range(options.repeats):
            samples.append(first_step_s(scratch, dataset, repeat))
            log(f"first step after {samples[-1]:.1f} s")
    show({"command_to_first_step_s": figure(samples, "s")}, options.json)


if __name__ == "__main__":
    main()
