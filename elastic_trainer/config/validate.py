"""Checks of a whole configuration: ranges, choices, and settings that contradict each other."""

from typing import Any

from elastic_trainer.config.schema import (
    CHANNELS,
    COST,
    DATA_FORMATS,
    ENCRYPTION,
    LR_SCHEDULES,
    MODELS,
    ON_ERROR,
    OPTIMIZERS,
    PACKING,
    PRECISIONS,
    REDUCTIONS,
    SCHEDULES,
    Config,
    ElasticConfig,
)
from elastic_trainer.config.workers import fewest_workers, fixed_stages
from elastic_trainer.errors import ConfigError

CHOICES: dict[str, tuple[str, ...]] = {
    "model.name": MODELS,
    "loss.reduction": REDUCTIONS,
    "data.format": DATA_FORMATS,
    "data.on_error": ON_ERROR,
    "data.packing": PACKING,
    "data.cost": COST,
    "train.precision": PRECISIONS,
    "optim.name": OPTIMIZERS,
    "optim.lr_schedule": LR_SCHEDULES,
    "pipeline.schedule": SCHEDULES,
    "transport.channel": CHANNELS,
    "transport.encryption": ENCRYPTION,
}

# Lowest and highest value; None: no limit on that side. Null settings are not checked.
LIMITS: dict[str, tuple[float, float | None]] = {
    "data.sequence_length": (1, None),
    "data.prefetch_updates": (1, None),
    "data.num_loaders": (1, None),
    "data.media_workers": (0, None),
    "data.media_cache_mb": (0, None),
    "data.patch_size": (2, None),
    "data.max_patches": (4, None),
    "data.max_image_pixels": (1, None),
    "data.sample_rate": (1000, None),
    "data.mel_bins": (1, None),
    "data.max_audio_s": (0.01, None),
    "data.max_tokens_per_microbatch": (0, None),
    "data.size_sigma": (0, 4),
    "train.global_batch_size": (1, None),
    "train.max_steps": (1, None),
    "train.num_epochs": (1, None),
    "train.seed": (0, 2**63 - 1),
    "train.eval_steps": (0, None),
    "train.eval_batches": (0, None),
    "train.max_grad_norm": (0, None),
    "optim.learning_rate": (0, None),
    "optim.beta1": (0, 1),
    "optim.beta2": (0, 1),
    "optim.eps": (0, None),
    "optim.weight_decay": (0, None),
    "optim.momentum_decay": (0, None),
    "optim.warmup_steps": (0, None),
    "optim.min_lr_ratio": (0, 1),
    "pipeline.num_stages": (1, None),
    "pipeline.microbatch_size": (1, None),
    "pipeline.commit_every": (0, None),
    "pipeline.segment_updates": (0, None),
    "cluster.num_workers": (1, None),
    # A worker on a busy machine can miss a second without being lost.
    "cluster.start_timeout_s": (1, None),
    "elastic.stall_limit_s": (1, None),
    "elastic.lease_limit_s": (0.5, None),
    "elastic.min_workers": (1, None),
    "elastic.num_spares": (0, None),
    "elastic.max_failures": (-1, None),
    "elastic.max_preemptions": (-1, None),
    "elastic.refill_updates": (1, None),
    "elastic.snapshot_every": (-1, None),
    "checkpoint.every_steps": (0, None),
    "checkpoint.num_to_keep": (1, None),
    "metrics.port": (0, 65535),
    "numerics.threads_per_stage": (1, None),
}


def validate(config: Config) -> None:
    """Raise the ConfigError of the first rule that `config` breaks."""
    for path, choices in CHOICES.items():
        _check_choice(path, _get(config, path), choices)
    for path, (low, high) in LIMITS.items():
        _check_limits(path, _get(config, path), low, high)
    _check_batch(config)
    _check_stages(config)
    _check_schedule(config)
    _check_data(config)
    _check_train(config)
    _check_cluster(config)
    _check_elastic(config)


def _get(config: Config, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def _check_choice(path: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"`{path}` is {value!r}", f"It must be one of {', '.join(choices)}.")


def _check_limits(path: str, value: float | None, low: float, high: float | None) -> None:
    if value is None or (value >= low and (high is None or value <= high)):
        return
    wanted = f"at least {low}" if high is None else f"between {low} and {high}"
    raise ConfigError(f"`{path}` is {value}", f"It must be {wanted}.")


def _check_batch(config: Config) -> None:
    batch, micro = config.train.global_batch_size, config.pipeline.microbatch_size
    if config.pipeline.schedule == "async_1f1b" or batch % micro == 0:
        return
    below, above = batch // micro * micro, (batch // micro + 1) * micro
    batches = " or ".join(str(size) for size in (below, above) if size)
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    nearest = sorted(sorted(divisors, key=lambda size: abs(size - micro))[:2])
    micros = " or ".join(str(size) for size in nearest)
    raise ConfigError(
        f"`train.global_batch_size` {batch} does not divide into microbatches of "
        f"{micro} (`pipeline.microbatch_size`)",
        f"The nearest that work: train.global_batch_size={batches}, or "
        f"pipeline.microbatch_size={micros}.",
    )


def _check_stages(config: Config) -> None:
    stages, workers = config.pipeline.num_stages, config.cluster.num_workers
    if stages is not None and stages != workers:
        raise ConfigError(
            f"`pipeline.num_stages` is {stages} but `cluster.num_workers` is {workers}",
            "Each worker holds one stage: set both alike, or leave pipeline.num_stages null.",
        )
    cuts = config.pipeline.cuts
    if cuts and len(cuts) != workers - 1:
        raise ConfigError(
            f"`pipeline.cuts` has {len(cuts)} cuts for {workers} stages",
            f"{workers} stages need {workers - 1}; empty lets the planner cut.",
        )
    if any(low >= high for low, high in zip([0, *cuts], cuts, strict=False)):
        raise ConfigError(f"`pipeline.cuts` is {cuts}", "Layer indices must be above 0 and ascend.")


def _check_schedule(config: Config) -> None:
    if config.pipeline.schedule == "async_1f1b" and config.train.precision == "fp16":
        raise ConfigError(
            "`train.precision` fp16 needs a synchronous schedule: its loss scale is shared by all "
            "stages of an update",
            "Use train.precision=bf16 or pipeline.schedule=1f1b.",
        )


def _check_data(config: Config) -> None:
    data = config.data
    if data.format == "columns" and not data.input_columns:
        raise ConfigError(
            "`data.input_columns` is empty",
            "Format columns needs the names of the columns that feed the model.",
        )
    if data.format != "columns" and (data.input_columns or data.label_columns):
        raise ConfigError(
            f"`data.input_columns` and `data.label_columns` are not used by format {data.format}",
            "Set data.format=columns, or leave them empty.",
        )
    if data.format != "media" and data.columns:
        raise ConfigError(
            f"`data.columns` is not used by format {data.format}",
            "Set data.format=media, or leave it empty.",
        )
    if data.format != "synthetic" and data.size_sigma:
        raise ConfigError(
            f"`data.size_sigma` is not used by format {data.format}",
            "Set data.format=synthetic, or leave it 0.",
        )
    if config.pipeline.schedule == "async_1f1b" and data.max_tokens_per_microbatch:
        raise ConfigError(
            "`data.max_tokens_per_microbatch` needs a synchronous schedule: an asynchronous one "
            "updates after each microbatch, so it cannot divide one into two",
            "Set it to 0 and lower pipeline.microbatch_size, or use pipeline.schedule=1f1b.",
        )


def _check_train(config: Config) -> None:
    train = config.train
    for name in ("beta1", "beta2"):
        if getattr(config.optim, name) == 1:
            raise ConfigError(f"`optim.{name}` is 1", "It must be below 1, or nothing is learnt.")
    if train.max_steps is None and train.num_epochs is None:
        raise ConfigError(
            "`train.max_steps` and `train.num_epochs` are both null", "Set at least one of them."
        )
    if train.eval_steps and not train.eval_batches:
        raise ConfigError(
            f"`train.eval_steps` is {train.eval_steps} but `train.eval_batches` is 0",
            "Set train.eval_batches to evaluate, or train.eval_steps=0 not to.",
        )
    if config.loss.reduction == "mean" and config.loss.target is None:
        raise ConfigError(
            "`loss.reduction` mean describes your own loss, and `loss.target` is null",
            "Set loss.target; the shipped losses are sums.",
        )


def _check_cluster(config: Config) -> None:
    address = config.cluster.address
    if address not in (None, "local", "auto"):
        if address.startswith("ray://"):
            raise ConfigError(
                f"`cluster.address` is {address!r}, an address of Ray Client, through which "
                "the trainer does not run",
                "Give HOST:PORT of the cluster's GCS (port 6379 unless `ray start --port` says "
                "otherwise), or submit the command as a job: `ray job submit -- elastic-trainer …`",
            )
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"`cluster.address` is {address!r}", "It must be local, auto or HOST:PORT."
            )
    for name, amount in config.cluster.resources_per_worker.items():
        if amount < 0:
            raise ConfigError(f"`cluster.resources_per_worker.{name}` is {amount}, below 0")


def _check_elastic(config: Config) -> None:
    elastic, most = config.elastic, config.cluster.num_workers
    fewest = fewest_workers(config)
    if fewest > most:
        raise ConfigError(
            f"`elastic.min_workers` is {fewest} but `cluster.num_workers`, the most, is {most}",
            "Lower the one or raise the other; --workers MIN:MAX sets both.",
        )
    if (fixed := fixed_stages(config)) is not None and fewest < fixed:
        raise ConfigError(
            f"`elastic.min_workers` is {fewest}, but `pipeline` asks for {fixed} stages",
            "Leave pipeline.num_stages null and pipeline.cuts empty to train with fewer workers.",
        )
    kept_for = [
        (name, value)
        for name, value in (
            ("num_spares", elastic.num_spares),
            ("snapshot_every", elastic.snapshot_every),
        )
        if value > 0
    ]
    if kept_for and elastic.max_failures == 0 == elastic.max_preemptions:
        name, value = kept_for[0]
        raise ConfigError(
            f"`elastic.{name}` is {value}, but `elastic.max_failures` and "
            "`elastic.max_preemptions` are 0: the first loss ends the run",
            f"Raise one of them, or set elastic.{name}=0.",
        )
    # The shipped lease bends to a shorter stall limit; one that somebody chose does not.
    chosen = elastic.lease_limit_s != ElasticConfig().lease_limit_s
    if chosen and elastic.lease_limit_s > elastic.stall_limit_s:
        raise ConfigError(
            f"`elastic.lease_limit_s` is {elastic.lease_limit_s:g}, above `elastic.stall_limit_s` "
            f"{elastic.stall_limit_s:g}",
            "No wait is longer than the stall limit: lower the lease or raise that limit.",
        )
