"""Training through Ray gives the bits of one process, whatever the stages, schedule and stops."""

import json
import math
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_trainer import fit
from elastic_trainer.config import Config
from elastic_trainer.data.tokenizer import load_tokenizer, train_bpe
from elastic_trainer.models.registry import load_model
from elastic_trainer.observability.display import SilentDisplay
from elastic_trainer.run import checkpoints, evaluate, export, generate, status
from elastic_trainer.testing.in_process import even_plan
from elastic_trainer.testing.oracle import DelayedOracle, SynchronousOracle
from elastic_trainer.testing.runs import (
    run_config,
    saved_state,
    synchronous_reference,
    training_batches,
)
from elastic_trainer.testing.toys import assert_same_states
from elastic_trainer.types import RunResult

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_UPDATES = 6
STOPPED_MAX_STEPS = 60
ASYNC_UPDATES, COMMIT_EVERY = 30, 4
TEXTS = [
    "The pipeline drains, then the next segment begins.\n" * repeats + f"row {repeats}"
    for repeats in (1, 7, 0, 3, 2, 5, 1, 4)
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text dataset of four updates per epoch, as `make-dataset` lays it out."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = train_bpe(TEXTS, 290)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "data").mkdir()
    for split, rows in (("train", TEXTS), ("eval", TEXTS[:4])):
        name = f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"text": rows}), folder / "data" / name, row_group_size=3)
    return folder


def settings(texts: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Tied embeddings, dropout, clipping, and epochs that end in short batches and padding."""
    base: dict[str, dict[str, Any]] = {
        "data": {"path": str(texts), "sequence_length": 12},
        "model": {
            "name": "gpt",
            "args": {
                "num_layers": 4,
                "dim": 16,
                "num_heads": 2,
                "dropout": 0.1,
                "tie_embeddings": True,
            },
        },
        "train": {
            "global_batch_size": 6,
            "max_steps": NUM_UPDATES,
            "eval_batches": 0,
            "max_grad_norm": 0.3,
        },
        "pipeline": {"microbatch_size": 2, "segment_updates": 2},
        "checkpoint": {"every_steps": 2, "num_to_keep": 100},
    }
    for section, fields in sections.items():
        base[section] = {**base[section], **fields}
    return base


def train(address: str, run_dir: Path, config: Any, workers: int, **options: Any) -> RunResult:
    options.setdefault("display", False)
    return fit(config, address=address, run_dir=run_dir, workers=workers, **options)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_lines_equal(run_dir: Path, oracle: SynchronousOracle) -> None:
    """One line per update, in order, with the loss and the norm of the oracle."""
    found = lines(run_dir)
    assert [line["update"] for line in found] == list(range(1, len(oracle.losses) + 1))
    assert [line["loss"] for line in found] == oracle.losses
    assert [line["grad_norm"] for line in found] == pytest.approx(oracle.norms, rel=1e-12)


@pytest.fixture(scope="module")
def oracle(texts: Path, two_stages: Path) -> SynchronousOracle:
    return synchronous_reference(run_config(two_stages), NUM_UPDATES)


@pytest.fixture(scope="module")
def two_stages(ray_address: str, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run at two stages, 1F1B, with evaluation."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    config = settings(texts, train={"eval_batches": 100})
    result = train(ray_address, run_dir, config, 2)
    assert (result.status, result.update) == ("completed", NUM_UPDATES), result
    return run_dir


@pytest.fixture(scope="module")
def three_stages(ray_address: str, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run at three stages, GPipe, with recompute."""
    run_dir = tmp_path_factory.mktemp("three") / "run"
    config = settings(texts, model={"recompute": True}, pipeline={"schedule": "gpipe"})
    result = train(ray_address, run_dir, config, 3)
    assert (result.status, result.update) == ("completed", NUM_UPDATES), result
    return run_dir


def test_the_data_holds_the_difficulties(two_stages: Path, oracle: SynchronousOracle) -> None:
    """Else the tests below would prove less than they say."""
    config = run_config(two_stages)
    infos = [info for info, _ in training_batches(config, 1, NUM_UPDATES)]
    assert len({info.num_valid for info in infos}) > 1
    assert len({tuple(m.num_valid for m in info.microbatches) for info in infos}) > 1
    assert min(info.num_samples for info in infos) < config.train.global_batch_size
    assert infos[0].end.epoch == 0 and infos[-1].end.epoch > 0
    assert any(m.num_valid < m.num_tokens for info in infos for m in info.microbatches)
    assert min(norm for norm in oracle.norms if norm) > config.train.max_grad_norm


def test_two_stages_equal_one_process(two_stages: Path, oracle: SynchronousOracle) -> None:
    manifest, state = saved_state(two_stages)
    assert manifest.update == NUM_UPDATES
    assert "optim/tokens.weight/exp_avg_sq" in state["embed"]
    assert_same_states(state, oracle.layer_states())
    assert_lines_equal(two_stages, oracle)


def test_three_stages_with_recompute_equal_one_process(
    three_stages: Path, oracle: SynchronousOracle
) -> None:
    assert_same_states(saved_state(three_stages)[1], oracle.layer_states())
    assert_lines_equal(three_stages, oracle)


def interrupted(run_dir: Path, to: Path, update: int) -> Path:
    """A copy of a run as it stood when only the checkpoints up to `update` were complete."""
    shutil.copytree(run_dir, to)
    for info in checkpoints(to):
        if info.update > update:
            (Path(info.path) / "manifest.json").unlink()
    assert max(info.update for info in checkpoints(to)) == update
    return to


class Notes(SilentDisplay):
    """Keeps what it is told; asks the run to stop, as Ctrl-C does, after some update."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.messages: list[str] = []
        self.updates: list[int] = []
        self.num_stages: list[int] = []
        self._stop_after = stop_after

    def plan(self, plan: Mapping[str, Any]) -> None:
        self.num_stages.append(len(plan["stages"]))

    def update(self, line: Mapping[str, Any]) -> None:
        self.updates.append(line["update"])
        if self._stop_after is not None and line["update"] >= self._stop_after:
            self._stop_after = None
            os.kill(os.getpid(), signal.SIGINT)

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_three_stages_go_on_at_one(
    ray_address: str, three_stages: Path, texts: Path, oracle: SynchronousOracle, tmp_path: Path
) -> None:
    run_dir = interrupted(three_stages, tmp_path / "run", 2)
    notes = Notes()
    result = train(ray_address, run_dir, settings(texts), 1, resume="auto", display=notes)
    assert (result.status, result.update) == ("completed", NUM_UPDATES), result
    assert notes.messages == ["resuming from update 2"]
    assert notes.updates == [3, 4, 5, 6] and notes.num_stages == [1], "it showed the old run"
    assert_same_states(saved_state(run_dir)[1], oracle.layer_states())
    assert_lines_equal(run_dir, oracle)


def test_a_stopped_run_goes_on_at_three_stages(
    ray_address: str, texts: Path, tmp_path: Path
) -> None:
    """Nothing shows in state, lines or samples that the run was ever interrupted."""
    run_dir, notes = tmp_path / "run", Notes(stop_after=2)
    config = settings(texts, train={"max_steps": STOPPED_MAX_STEPS}, checkpoint={"every_steps": 0})
    result = train(ray_address, run_dir, config, 2, display=notes)
    assert result.status == "stopped", result
    assert 2 <= result.update < STOPPED_MAX_STEPS
    half = saved_state(run_dir)[0]
    assert half.update == result.update
    assert [line["update"] for line in lines(run_dir)] == list(range(1, half.update + 1))

    notes = Notes()
    result = train(ray_address, run_dir, config, 3, resume="auto", display=notes)
    assert (result.status, result.update) == ("completed", STOPPED_MAX_STEPS), result
    assert notes.messages == [f"resuming from update {half.update}"]
    assert notes.updates == list(range(half.update + 1, STOPPED_MAX_STEPS + 1))
    undisturbed = synchronous_reference(run_config(run_dir), STOPPED_MAX_STEPS)
    assert_same_states(saved_state(run_dir)[1], undisturbed.layer_states())
    assert_lines_equal(run_dir, undisturbed)
    assert_each_sample_once(run_config(run_dir), half.update, half.cursor)


def assert_each_sample_once(config: Config, update: int, cursor: Any) -> None:
    """The samples before and after the stop, by what the loader reads from the saved position."""
    before = training_batches(config, 1, update)
    after = training_batches(config, update + 1, STOPPED_MAX_STEPS, cursor)
    epoch, seen, epochs = 0, Counter[str](), []
    for info, _ in [*before, *after]:
        seen.update(sample for m in info.microbatches for sample in m.sample_ids)
        if info.end.epoch > epoch:
            epoch = info.end.epoch
            epochs.append(seen)
            seen = Counter()
    assert len(epochs) > 2
    for counted in epochs:
        assert set(counted.values()) == {1}


def test_asynchronous_equals_delayed_updates(ray_address: str, texts: Path, tmp_path: Path) -> None:
    """Bit for bit, drained at the commit points; each stage reports how late it is: P-1-s."""
    run_dir = tmp_path / "run"
    config = settings(
        texts,
        train={"max_steps": ASYNC_UPDATES},
        pipeline={"schedule": "async_1f1b", "commit_every": COMMIT_EVERY, "cuts": [3]},
        checkpoint={"every_steps": 0},
    )
    scraper = Scraper(run_dir)
    scraper.start()
    result = train(ray_address, run_dir, config, 2)
    scraper.stop()
    assert (result.status, result.update) == ("completed", ASYNC_UPDATES), result
    resolved = run_config(run_dir)
    model = load_model(resolved)
    plan = even_plan(model, 2, "async_1f1b", cuts=[3])
    want = DelayedOracle(model, resolved, plan)
    batches = [m[0] for _, m in training_batches(resolved, 1, ASYNC_UPDATES)]
    for first in range(1, ASYNC_UPDATES + 1, COMMIT_EVERY):
        want.segment(first, batches[first - 1 : min(first - 1 + COMMIT_EVERY, ASYNC_UPDATES)])
    assert_same_states(saved_state(run_dir)[1], want.layer_states())
    assert [line["loss"] for line in lines(run_dir)] == want.losses
    assert scraper.staleness == {"0": 1.0, "1": 0.0}


class Scraper(threading.Thread):
    """Reads the staleness of all stages from the run's /metrics as soon as they are there."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.staleness: dict[str, float] = {}
        self._targets = run_dir / "prometheus" / "targets.json"
        self._stopped = threading.Event()

    def run(self) -> None:
        pattern = re.compile(r'elastictrainer_stage_staleness_updates\{.*?stage="(\d+)".*\} (\S+)')
        while not self._stopped.wait(0.01) and len(self.staleness) < 2:
            try:
                [target] = json.loads(self._targets.read_text())[0]["targets"]
                with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
            except (OSError, ValueError, IndexError):
                continue  # not there yet, or gone
            self.staleness = {s: float(value) for s, value in pattern.findall(text)}

    def stop(self) -> None:
        self._stopped.set()
        self.join(10)


def test_evaluation_afterwards_gives_the_reported_loss(two_stages: Path) -> None:
    reported = status(two_stages)["eval_loss"]
    found = evaluate(two_stages)
    assert found["update"] == NUM_UPDATES and found["tokens"] > 0
    assert found["loss"] == pytest.approx(reported, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(reported), rel=1e-5)


def test_the_export_has_equal_logits_in_transformers(two_stages: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from elastic_trainer.models.inference import Unsplit

    model = load_model(run_config(two_stages))
    ours = Unsplit(model, saved_state(two_stages)[1])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export(two_stages, tmp_path / "hf"))
    tokenizer = load_tokenizer(str(tmp_path / "hf" / "tokenizer.json"))
    tokens = torch.tensor([tokenizer.encode("The pipeline drains")[:12]])
    with torch.no_grad():
        logits = theirs.eval()(tokens).logits
    torch.testing.assert_close(ours.logits(tokens), logits, rtol=1e-5, atol=1e-6)


def test_generation_depends_on_the_seed_alone(two_stages: Path) -> None:
    texts = [generate(two_stages, "The ", max_tokens=20, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("The ") and len(text) > 4 for text in texts)
