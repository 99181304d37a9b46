"""A trial of a running run: a script is played on it, and judged."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_trainer.config import load_config
from elastic_trainer.observability.record import CONFIG_FILE
from elastic_trainer.observability.runs import resolve_run
from elastic_trainer.run.control import coordinator_of
from elastic_trainer.testing.chaos.live import FolderView, RayLevers
from elastic_trainer.testing.chaos.player import Player
from elastic_trainer.testing.chaos.script import Step, check_steps, count_from
from elastic_trainer.testing.chaos.trace import Change, compress, trace_steps
from elastic_trainer.testing.chaos.verdict import Verdict, judge

MARGIN_S = 30.0  # to recover in, beyond what it may take to find a wedged worker
GRACE_S = 10.0  # how much longer is waited, to tell how late a run was and not only that it was


def try_run(
    run: str | Path,
    steps: Sequence[Step] = (),
    *,
    trace: Sequence[Change] = (),
    speedup: float = 1.0,
    seed: int = 0,
    limit_s: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Do the steps to a running run, and see how it takes them.

    Args:
        run: folder of the run, its name or `latest`.
        trace: more steps: comings and goings of nodes, `speedup` times as fast.
        seed: decides what the steps leave open.
        limit_s: from a fault to the next committed update; None: `elastic.stall_limit_s` and half a
            minute.
        tell: is told what is being done.

    Raises:
        ConfigError: a step is impossible.
        RunError: no such run, or it has ended.
        ClusterError: its cluster does not answer.
    """
    run_dir = resolve_run(run)
    began = time.time()
    with coordinator_of(run_dir) as (coordinator, found):
        if limit_s is None:
            limit_s = load_config(run_dir / CONFIG_FILE).elastic.stall_limit_s + MARGIN_S
        view = FolderView(run_dir)
        view.look()
        update = view.commits[-1].update if view.commits else 0
        steps = count_from(steps, update)
        total = found.get("total_updates") or 0
        check_steps(steps, update=update, total=total, nodes=view.nodes)
        replayed = trace_steps(compress(trace, speedup), found["min_workers"], found["num_workers"])
        player = Player(
            [*steps, *replayed],
            view,
            RayLevers(run_dir, coordinator),
            seed=seed,
            patience_s=limit_s + GRACE_S,
            tell=tell,
        )
        done = player.play()
    return judge(done, view.facts(time.time(), began), limit_s)
