"""What can be done with a run that has a checkpoint: export, generate, evaluate."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.actors.recorder import perplexity
from elastic_trainer.actors.saving import checkpoint_root
from elastic_trainer.checkpoint.export import export_hf
from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.resume import resolve_resume
from elastic_trainer.checkpoint.store import CheckpointStore, Manifest
from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.media import decoders
from elastic_trainer.data.tokenizer import load_tokenizer
from elastic_trainer.errors import CheckpointError, DataError
from elastic_trainer.models.inference import Unsplit
from elastic_trainer.models.registry import load_model
from elastic_trainer.observability.record import CONFIG_FILE
from elastic_trainer.observability.runs import resolve_run
from elastic_trainer.run.cluster import add_working_folder
from elastic_trainer.types import CheckpointInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A run's configuration and one of its checkpoints."""

    config: Config
    run_dir: Path
    store: CheckpointStore
    manifest: Manifest


def open_saved(run: str | Path, checkpoint: str = "auto") -> Saved:
    """The configuration and the newest usable (or the named) checkpoint of a run.

    Raises:
        RunError: no such run.
        CheckpointError: it has no complete checkpoint.
    """
    add_working_folder()
    run_dir = resolve_run(run)
    config = load_config(run_dir / CONFIG_FILE)
    point = resolve_resume(CheckpointStore(checkpoint_root(config, run_dir)), checkpoint)
    if point is None:
        raise CheckpointError(
            f"{run_dir.name} has no complete checkpoint", "Let it train to its first one."
        )
    return Saved(config=config, run_dir=run_dir, store=point.store, manifest=point.manifest)


def checkpoints(run: str | Path) -> Sequence[CheckpointInfo]:
    """All complete checkpoints of a run, oldest first."""
    run_dir = resolve_run(run)
    config = load_config(run_dir / CONFIG_FILE)
    return CheckpointStore(checkpoint_root(config, run_dir)).list()


def export(run: str | Path, to: str | Path, checkpoint: str = "auto") -> Path:
    """Write a checkpoint in Hugging Face's layout.

    Raises:
        ModelError: the model has no such layout.
    """
    saved = open_saved(run, checkpoint)
    export_hf(saved.store, saved.manifest, saved.config, to)
    return Path(to)


def generate(
    run: str | Path,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    checkpoint: str = "auto",
) -> str:
    """Text that continues `prompt`, the prompt included.

    Raises:
        DataError: the run has no tokenizer.
    """
    saved = open_saved(run, checkpoint)
    info = describe(saved.config)
    if info.tokenizer_path is None:
        raise DataError("the run has no tokenizer", "Only models of text generate text.")
    tokenizer = load_tokenizer(info.tokenizer_path)
    tokens = tokenizer.encode(prompt) or [info.eos_id or 0]
    new = _unsplit(saved).generate(
        tokens, max_tokens, temperature=temperature, top_k=top_k, seed=seed, eos_id=info.eos_id
    )
    return prompt + str(tokenizer.decode(new))


def evaluate(run: str | Path, checkpoint: str = "auto") -> dict[str, Any]:
    """Held-out loss of a checkpoint, measured in this process over the whole held-out split."""
    saved = open_saved(run, checkpoint)
    config = saved.config
    if describe(config).num_eval_rows is None:
        raise DataError(f"{config.data.path} has no held-out data", "Set data.eval_path.")
    stream = BatchStream(config, "eval", config.train.global_batch_size, num_epochs=1)
    batches = (
        {name: torch.from_numpy(array) for name, array in fields.items()}
        for _, microbatches in stream
        for fields in microbatches
    )
    with decoders.kept():
        total, num_valid = _unsplit(saved).evaluate(batches)
    loss = total / max(num_valid, 1)
    return {
        "run": saved.run_dir.name,
        "update": saved.manifest.update,
        "loss": loss,
        "perplexity": perplexity(loss, config.data.format),
        "tokens": num_valid,
    }


def _unsplit(saved: Saved) -> Unsplit:
    model = load_model(saved.config)
    states = {name: read_layer(saved.store, saved.manifest, name) for name in model.names}
    return Unsplit(model, states, seed=saved.config.train.seed)
