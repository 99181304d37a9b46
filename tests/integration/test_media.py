"""Pictures, sound and text through Ray, a damaged file among them: the oracle's bits."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from elastic_trainer import fit
from elastic_trainer.data.tokenizer import train_bpe
from elastic_trainer.observability.runs import read_audit, read_events, read_updates
from elastic_trainer.testing.runs import (
    run_config,
    saved_state,
    synchronous_reference,
    training_batches,
)
from elastic_trainer.testing.toys import assert_same_states

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_ROWS, DAMAGED = 24, 5


def write_dataset(folder: Path) -> Path:
    """None to two pictures and clips per row; the picture of one row is cut short."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(NUM_ROWS):
        pictures = [picture(rng) for _ in range(number % 3)]
        if number == DAMAGED:
            pictures = [pictures[0][:60]]
        clips = [clip(rng) for _ in range(number // 3 % 3)]
        rows.append({"image": pictures, "audio": clips, "text": f"sample {number}"})
    files = pa.list_(pa.binary())
    schema = pa.schema([("image", files), ("audio", files), ("text", pa.string())])
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "train-0.parquet")
    (folder / "tokenizer.json").write_text(train_bpe([r["text"] for r in rows], 300).to_json())
    return folder


def picture(rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    shape = (*rng.integers(8, 60, 2), 3)
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def clip(rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, 0.1 * rng.normal(size=rng.integers(500, 9000)), 8000, format="WAV")
    return file.getvalue()


def settings(folder: Path, num_epochs: int = 1, **data: Any) -> dict[str, Any]:
    return {
        "model": {
            "name": "multimodal",
            "args": {"vision_layers": 2, "audio_layers": 1, "lm_layers": 1, "dim": 16},
        },
        "data": {
            "path": str(write_dataset(folder)),
            "format": "media",
            "max_patches": 16,
            "on_error": "skip",
            **data,
        },
        "train": {"global_batch_size": 8, "num_epochs": num_epochs, "eval_batches": 0},
        "pipeline": {"microbatch_size": 2, "cuts": [2]},  # inside the vision encoder
        "optim": {"lr_schedule": "constant"},
    }


def test_a_damaged_picture_is_skipped_and_all_else_is_exact(
    ray_address: str, tmp_path: Path
) -> None:
    config = settings(tmp_path / "data")
    result = fit(config, address=ray_address, run_dir=tmp_path / "run", display=False)
    assert (result.status, result.update) == ("completed", 3), result
    oracle = synchronous_reference(run_config(tmp_path / "run"), 3)
    assert_same_states(saved_state(tmp_path / "run")[1], oracle.layer_states())
    updates = read_updates(tmp_path / "run")
    assert [line["loss"] for line in updates] == oracle.losses
    assert sum(line["unreadable"] for line in updates) == 1
    audit = read_audit(tmp_path / "run")
    read = sorted(int(i) for line in audit for ids in line["samples"] for i in ids)
    assert read == [n for n in range(NUM_ROWS) if n != DAMAGED]
    ((number, why),) = [entry for line in audit for entry in line.get("skipped", {}).items()]
    assert number == str(DAMAGED) and "the picture is damaged" in why
    assert any(event["kind"] == "skipped" for event in read_events(tmp_path / "run"))


def test_packing_that_follows_the_stages_leaves_batches_their_samples(
    ray_address: str, tmp_path: Path
) -> None:
    adaptive = {"cost": "adaptive", "num_loaders": 2, "prefetch_updates": 1}
    config = settings(tmp_path / "data", num_epochs=3, **adaptive)
    config["pipeline"]["segment_updates"] = 1
    run_dir = tmp_path / "run"
    result = fit(config, address=ray_address, run_dir=run_dir, display=False)
    assert (result.status, result.update) == ("completed", 9), result
    undisturbed = run_config(run_dir)  # in one process, which packs as under frozen
    oracle = synchronous_reference(undisturbed, 9)
    assert [line["loss"] for line in read_updates(run_dir)] == pytest.approx(
        oracle.losses, rel=1e-3
    )
    found = [line["samples"] for line in read_audit(run_dir)]
    frozen = [
        [list(m.sample_ids) for m in info.microbatches]
        for info, _ in training_batches(undisturbed, 1, 9)
    ]
    assert list(map(flat, found)) == list(map(flat, frozen)) and found != frozen
    told = [event["message"] for event in read_events(run_dir) if event["kind"] == "packing"]
    assert told[0].startswith("batches are packed for 2 stages; times their predictions, parts")


def flat(samples: list[list[str]]) -> list[str]:
    return sorted(sample for ids in samples for sample in ids)
