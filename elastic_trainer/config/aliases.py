"""Names that users bring from other trainers, and which of ours they mean."""

import difflib
from collections.abc import Sequence

from elastic_trainer.errors import ConfigError

# Name elsewhere -> (our setting, what to mind). An empty setting: we have none, the note says why.
ALIASES: dict[str, tuple[str, str]] = {
    # Hugging Face TrainingArguments
    "output_dir": ("run.storage_path", ""),
    "run_name": ("run.name", ""),
    "num_train_epochs": ("train.num_epochs", ""),
    "per_device_train_batch_size": (
        "pipeline.microbatch_size",
        "Samples per update are `train.global_batch_size`, whatever the number of workers.",
    ),
    "per_device_eval_batch_size": ("pipeline.microbatch_size", ""),
    "gradient_accumulation_steps": (
        "train.global_batch_size",
        "Accumulation follows from it and `pipeline.microbatch_size`.",
    ),
    "learning_rate": ("optim.learning_rate", ""),
    "lr_scheduler_type": ("optim.lr_schedule", ""),
    "adam_beta1": ("optim.beta1", ""),
    "adam_beta2": ("optim.beta2", ""),
    "adam_epsilon": ("optim.eps", ""),
    "optim": ("optim.name", ""),
    "bf16": ("train.precision", "Its values are fp32, bf16 and fp16."),
    "fp16": ("train.precision", "Its values are fp32, bf16 and fp16."),
    "data_seed": ("train.seed", ""),
    "save_steps": ("checkpoint.every_steps", ""),
    "save_total_limit": ("checkpoint.num_to_keep", ""),
    "gradient_checkpointing": ("model.recompute", ""),
    "dataloader_num_workers": ("data.prefetch_updates", ""),
    "dataloader_prefetch_factor": ("data.prefetch_updates", ""),
    "resume_from_checkpoint": ("", "Resume with the option `--resume auto` or `--resume PATH`."),
    "logging_steps": ("", "Every update is a line of `metrics.jsonl` in the run folder."),
    "report_to": ("", "Every run writes `metrics.jsonl` and serves Prometheus (`metrics.port`)."),
    "warmup_ratio": ("optim.warmup_steps", "It counts updates."),
    "eval_strategy": ("train.eval_steps", "0 evaluates at the end only."),
    # Lightning
    "accumulate_grad_batches": (
        "train.global_batch_size",
        "Accumulation follows from it and `pipeline.microbatch_size`.",
    ),
    "gradient_clip_val": ("train.max_grad_norm", ""),
    "val_check_interval": ("train.eval_steps", ""),
    "limit_val_batches": ("train.eval_batches", ""),
    "max_epochs": ("train.num_epochs", ""),
    "precision": ("train.precision", ""),
    "devices": ("cluster.num_workers", ""),
    "default_root_dir": ("run.storage_path", ""),
    "save_top_k": ("checkpoint.num_to_keep", ""),
    "every_n_train_steps": ("checkpoint.every_steps", ""),
    "fast_dev_run": ("", "Use the option `--fast-dev-run`."),
    # torchtitan and Megatron
    "local_batch_size": ("pipeline.microbatch_size", ""),
    "global_batch_size": ("train.global_batch_size", ""),
    "micro_batch_size": ("pipeline.microbatch_size", ""),
    "seq_len": ("data.sequence_length", ""),
    "seq_length": ("data.sequence_length", ""),
    "max_seq_length": ("data.sequence_length", ""),
    "block_size": ("data.sequence_length", ""),
    "steps": ("train.max_steps", ""),
    "train_iters": ("train.max_steps", ""),
    "max_norm": ("train.max_grad_norm", ""),
    "pipeline_parallel_degree": ("pipeline.num_stages", ""),
    "pipeline_model_parallel_size": ("pipeline.num_stages", ""),
    "pipeline_parallel_schedule": ("pipeline.schedule", ""),
    "pipeline_parallel_microbatch_size": ("pipeline.microbatch_size", ""),
    "module_fqns_per_model_part": ("pipeline.cuts", "It holds layer indices."),
    "keep_latest_k": ("checkpoint.num_to_keep", ""),
    "interval": ("checkpoint.every_steps", ""),
    # Ray Train, torchrun, accelerate
    "num_workers": ("cluster.num_workers", ""),
    "nproc_per_node": ("cluster.num_workers", ""),
    "num_processes": ("cluster.num_workers", ""),
    "mixed_precision": ("train.precision", "Its values are fp32, bf16 and fp16."),
    "max_preemption_failures": ("elastic.max_preemptions", ""),
    "max_restarts": ("elastic.max_failures", "Workers are replaced one by one, not all together."),
    "nnodes": ("cluster.num_workers", "Or the option `--workers MIN:MAX`."),
    "min_nodes": ("elastic.min_workers", ""),
    "max_nodes": ("cluster.num_workers", ""),
    "batch_size": (
        "train.global_batch_size",
        "It counts samples per update; `pipeline.microbatch_size` is what flows at a time.",
    ),
    "lr": ("optim.learning_rate", ""),
    "epochs": ("train.num_epochs", ""),
}


def explain_unknown(path: str, known: Sequence[str]) -> ConfigError:
    """The error for a key that is not in the schema, with what was probably meant."""
    what = f"Unknown setting `{path}`"
    leaf = path.split(".")[-1].lstrip("-").replace("-", "_").lower()
    if leaf in ALIASES:
        ours, note = ALIASES[leaf]
        hint = f"Here it is `{ours}`. {note}" if ours else note
        return ConfigError(what, hint.strip())
    below = [key for key in known if key.startswith(f"{path}.")]
    if below:
        return ConfigError(f"`{path}` is a section, not a setting", f"Set e.g. `{below[0]}`.")
    nearest = nearest_setting(path, known)
    if nearest:
        return ConfigError(what, f"Did you mean `{nearest}`?")
    return ConfigError(what, "docs/configuration.md lists every setting.")


def nearest_setting(path: str, known: Sequence[str]) -> str | None:
    """The known setting that is spelt most like `path`, or None."""
    leaf = path.split(".")[-1]
    same_leaf = [key for key in known if key.split(".")[-1] == leaf]
    if same_leaf:
        return difflib.get_close_matches(path, same_leaf, n=1, cutoff=0.0)[0]
    whole = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    by_leaf = {key.split(".")[-1]: key for key in known}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None
