"""`elastic-trainer train`: a run with its last words, in the foreground or detached."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from elastic_trainer.config import load_config
from elastic_trainer.data.info import describe
from elastic_trainer.errors import ElasticTrainerError, RunError
from elastic_trainer.observability.runs import is_run, read_status
from elastic_trainer.run.launch import INTERRUPTED, fit
from elastic_trainer.run.prepare import Launch, prepare
from elastic_trainer.types import RunResult

DETACH_S = 60.0  # a detached run that has not begun by then never will
END_S = 10.0  # how long it may then take to end after each of two requests
INTERRUPTED_CODE = 130
SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 60


def train_command(
    config_path: str | None,
    overrides: Sequence[str],
    *,
    workers: int | None = None,
    address: str | None = None,
    run_dir: str | None = None,
    resume: str | None = None,
    detach: bool = False,
    fast_dev_run: bool = False,
) -> int:
    """What the command does; returns its exit code.

    Raises:
        ElasticTrainerError: the run could not start.
    """
    console = Console(highlight=False)
    if detach:
        launch = prepare(
            config_path,
            overrides,
            workers=workers,
            address=address,
            run_dir=run_dir,
            resume=resume,
            fast_dev_run=fast_dev_run,
        )
        return _detach(console, launch, sys.argv[1:], run_dir is not None)
    result = fit(
        config_path,
        *overrides,
        workers=workers,
        address=address,
        run_dir=run_dir,
        resume=resume,
        fast_dev_run=fast_dev_run,
    )
    if result.status == "failed":
        raise ElasticTrainerError(result.reason, f"Run folder: {result.run_dir}")
    show_result(console, result)
    return INTERRUPTED_CODE if result.reason == INTERRUPTED else 0


def show_result(console: Console, result: RunResult) -> None:
    """How the run ended, a sample of what the model says, and what to do next."""
    console.print(f"\n[bold]{result.status}[/bold] at update {result.update}: {result.reason}")
    if result.eval_loss is not None:
        text = f"held-out loss {result.eval_loss:.4f}"
        if result.perplexity is not None:
            text += f", perplexity [bold]{result.perplexity:.2f}[/bold]"
        console.print(text)
    run = escape(result.run_dir)
    # Who interrupts twice does not want to wait for a text.
    speaks = bool(result.checkpoint) and result.reason != INTERRUPTED
    speaks = speaks and _show_sample(console, result)
    console.print(f"run folder: {run}")
    if result.status == "stopped":
        console.print(
            f"continue:   elastic-trainer train {run}/config.yaml --run-dir {run} --resume auto"
        )
    elif speaks:
        console.print(f"next:       elastic-trainer generate {run} --prompt 'import '")
    elif result.checkpoint is not None:
        console.print(f"next:       elastic-trainer checkpoints {run}")


def _show_sample(console: Console, result: RunResult) -> bool:
    """Generate some text; False where the model is not one of text."""
    config = load_config(Path(result.run_dir) / "config.yaml")
    if config.data.format != "text" or describe(config).tokenizer_path is None:
        return False
    from elastic_trainer.run.results import generate  # torch, only now that training is over

    text = generate(result.run_dir, SAMPLE_PROMPT, max_tokens=SAMPLE_TOKENS)
    console.print("sample of generated text:")
    console.print("\n".join(f"  | {line}" for line in text.splitlines()), markup=False)
    return True


def _detach(console: Console, launch: Launch, argv: Sequence[str], has_run_dir: bool) -> int:
    """Start the same command in a session of its own, and see it begin."""
    arguments = [a for a in argv if a != "--detach"]
    if not has_run_dir:
        arguments += ["--run-dir", str(launch.run_dir)]
    launch.run_dir.mkdir(parents=True, exist_ok=True)
    log = launch.run_dir / "trainer.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic_trainer.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _await_begin(process, launch.run_dir, log)
    except BaseException:  # given up, or interrupted: nothing may be left running
        _end(process)
        raise
    name = escape(launch.run_dir.name)
    console.print(f"run {name} goes on in the background (process {process.pid}), log {log}")
    console.print(f"look:  elastic-trainer status {escape(str(launch.run_dir))}")
    console.print(f"stop:  elastic-trainer stop {escape(str(launch.run_dir))}")
    return 0


def _await_begin(process: "subprocess.Popen[bytes]", run_dir: Path, log: Path) -> None:
    deadline = time.monotonic() + DETACH_S
    while not (is_run(run_dir) and read_status(run_dir)["alive"]):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RunError(f"the detached run did not start: {''.join(tail)}", f"See {log}.")
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a detached run: ask it, ask it to stop at once, then end its session by force."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
