"""The configuration: one tree of frozen dataclasses.

Each field's `doc` metadata feeds `docs/configuration.md` and `configs/default.yaml`, which
`python -m elastic_trainer.config` writes.
"""

from dataclasses import dataclass, field
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "async_1f1b")
MODELS = ("gpt", "vit", "mlp", "multimodal", "emulated", "hf")
OPTIMIZERS = ("adamw", "sgd", "nadam")
LR_SCHEDULES = ("constant", "linear", "cosine")
PRECISIONS = ("fp32", "bf16", "fp16")
DATA_FORMATS = ("text", "tokens", "columns", "media", "synthetic")
ON_ERROR = ("raise", "skip")
PACKING = ("order", "greedy", "exact")
COST = ("frozen", "adaptive")
CHANNELS = ("zmq", "torch")
ENCRYPTION = ("on", "off")
REDUCTIONS = ("sum", "mean")


def _doc(default: Any, text: str) -> Any:
    """A field with a default and the text of its entry in the reference."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run keeps its files."""

    name: str | None = _doc(None, "Name of the run; derived from the date and the model when null.")
    storage_path: str = _doc("runs", "Folder that holds the run folders.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which layers to train."""

    name: str = _doc("gpt", "A shipped model: gpt, vit, mlp, multimodal, emulated or hf.")
    target: str | None = _doc(
        None, "Your own model, `package.module:function`; overrides `model.name`."
    )
    args: dict[str, Any] = _doc({}, "Keyword arguments of the model function.")
    recompute: bool = _doc(False, "Drop activations after each layer's forward, recompute them.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised."""

    target: str | None = _doc(
        None, "Your own loss, `package.module:function`; null takes the model's."
    )
    reduction: str = _doc(
        "sum", "Whether your loss returns the `sum` over valid items or their `mean`."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where samples come from."""

    path: str = _doc("datasets/stdlib-text", "Parquet file or folder: local path or URI.")
    eval_path: str | None = _doc(None, "Held-out data; null takes the dataset's `eval` split.")
    format: str = _doc(
        "text",
        "text, tokens, columns (numbers as they are), media (pictures, sound and text) or "
        "synthetic.",
    )
    text_column: str = _doc("text", "Column with the text (format text).")
    tokens_column: str = _doc("tokens", "Column with lists of token ids (format tokens).")
    input_columns: list[str] = _doc([], "Columns that feed the first layer (format columns).")
    label_columns: list[str] = _doc([], "Columns that feed the loss (format columns).")
    tokenizer: str | None = _doc(
        None, "A `tokenizer.json`; null takes the one that lies beside the dataset."
    )
    sequence_length: int = _doc(128, "Tokens per packed sequence.")
    prefetch_updates: int = _doc(4, "Updates whose batches each loader prepares ahead of need.")
    num_loaders: int = _doc(
        1,
        "Loaders. Each reads the data and makes what some of the stages need of it, on their nodes "
        "where that can be.",
    )
    shuffle: bool = _doc(True, "Whether each epoch has its own order of rows.")
    columns: dict[str, str] = _doc(
        {}, "Columns that are named otherwise (format media), ours to yours: {image: img}."
    )
    on_error: str = _doc(
        "raise",
        "What to do with a sample whose picture, sound or text cannot be read (format media): "
        "raise, or skip it and say so in the audit.",
    )
    media_workers: int = _doc(
        2,
        "Processes of each loader that decode (format media). 0: it decodes by itself.",
    )
    media_cache_mb: int = _doc(
        128,
        "Megabytes of decoded pictures and clips that each loader keeps, because rows share them "
        "(format media). 0: none.",
    )
    patch_size: int = _doc(16, "Pixels along the side of a patch of a picture.")
    max_patches: int = _doc(256, "A picture is scaled down to at most so many patches.")
    max_image_pixels: int = _doc(
        4_000_000,
        "A larger picture is not decoded but an error; a JPEG is decoded at an eighth of its size "
        "at the least if that makes it fit.",
    )
    sample_rate: int = _doc(16000, "Sound is resampled to so many samples per second.")
    mel_bins: int = _doc(40, "Frequency bands of sound (log-mel).")
    max_audio_s: float = _doc(20.0, "Seconds of a clip that are used; the rest is cut off.")
    packing: str = _doc(
        "greedy",
        "How samples of unequal sizes (format media) share microbatches: greedy (balanced by "
        "predicted cost, longest first), exact (the same, solved where that is not too much work) "
        "or order (as they come). Which samples a batch holds does not depend on it.",
    )
    cost: str = _doc(
        "frozen",
        "What packing takes a sample to cost: what is predicted from its size (frozen: packing is "
        "a function of the data alone), or that, corrected by what the stages are seen to take "
        "(adaptive: it follows them, so a run's gradients are the same up to rounding only).",
    )
    max_tokens_per_microbatch: int = _doc(
        0,
        "Most tokens of a packed microbatch; a batch that does not fit gets more microbatches. "
        "0: any number.",
    )
    size_sigma: float = _doc(
        0.0,
        "Spread of the log-normal sizes of samples (format synthetic): the standard deviation of "
        "their logarithm. 0: samples have no sizes.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, how much and how precisely."""

    global_batch_size: int = _doc(
        32,
        "Samples per update, whatever the workers. Asynchronous schedules update once per "
        "microbatch instead.",
    )
    max_steps: int | None = _doc(None, "Updates to train for.")
    num_epochs: int | None = _doc(None, "Epochs to train for; the first limit reached ends it.")
    seed: int = _doc(0, "Seed of the initial weights, dropout and the order of samples.")
    eval_steps: int = _doc(
        0, "Evaluate on held-out data every so many updates; 0: at the end only."
    )
    eval_batches: int = _doc(8, "Batches of held-out data per evaluation; 0: no evaluation.")
    precision: str = _doc("fp32", "fp32, bf16 (autocast) or fp16 (autocast with a loss scaler).")
    max_grad_norm: float = _doc(
        1.0, "Clip the global gradient norm (per stage when asynchronous); 0: never."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer and its learning rate."""

    name: str = _doc("adamw", "adamw, sgd or nadam (decoupled weight decay).")
    learning_rate: float = _doc(1e-3, "Peak learning rate.")
    beta1: float = _doc(0.9, "First moment's decay (momentum for sgd).")
    beta2: float = _doc(0.999, "Second moment's decay.")
    eps: float = _doc(1e-8, "Added to the denominator.")
    weight_decay: float = _doc(0.01, "Decoupled weight decay.")
    momentum_decay: float = _doc(0.004, "NAdam's ψ: how slowly its momentum warms up.")
    lr_schedule: str = _doc("cosine", "constant, linear or cosine, after the warm-up.")
    warmup_steps: int = _doc(0, "Updates of linear warm-up.")
    min_lr_ratio: float = _doc(0.1, "Final learning rate over the peak.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How the model is split and in which order stages work."""

    schedule: str = _doc("1f1b", "gpipe, 1f1b or async_1f1b (weight stashing).")
    num_stages: int | None = _doc(None, "Stages; null: one per worker.")
    microbatch_size: int = _doc(4, "Samples per microbatch.")
    cuts: list[int] = _doc(
        [], "Index of the first layer of each stage but the first; empty: balanced by profile."
    )
    split_backward: bool = _doc(
        True,
        "Send a stage's input gradient first, and compute those of its weights while it would "
        "wait. It changes no bit.",
    )
    commit_every: int = _doc(
        0, "Asynchronous only: updates between two drains; 0: so many that they cost under 2%."
    )
    segment_updates: int = _doc(
        0, "Synchronous only: updates per segment; 0: about two seconds' worth."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Which Ray cluster, and what each worker gets."""

    address: str | None = _doc(
        None,
        "local (start Ray here), auto or HOST:PORT; null: the cluster of RAY_ADDRESS, which "
        "`ray job submit` sets, else local.",
    )
    num_workers: int = _doc(2, "Stage workers.")
    resources_per_worker: dict[str, float] = _doc(
        {}, "Ray resources per worker, e.g. {CPU: 2}; empty: one GPU where there are, else one CPU."
    )
    accelerator_type: str | None = _doc(None, "Accelerator as Ray names it, e.g. A100.")
    start_timeout_s: float = _doc(60.0, "How long to wait for room on the cluster.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportConfig:
    """How tensors travel between workers."""

    channel: str = _doc("zmq", "zmq, or torch (torch.distributed: NCCL on CUDA, gloo on CPU).")
    encryption: str = _doc("on", "on: CURVE between nodes; off: for private fabrics only.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving to storage."""

    every_steps: int = _doc(0, "Updates between two checkpoints; 0: at the end only.")
    num_to_keep: int = _doc(2, "Newest checkpoints to keep.")
    storage_path: str | None = _doc(
        None,
        "Folder or pyarrow URI for checkpoints, in a folder of the run's name there; null: inside "
        "the run folder.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Prometheus."""

    enabled: bool = _doc(True, "Serve /metrics.")
    host: str = _doc("127.0.0.1", "Address to bind.")
    port: int = _doc(0, "Port; 0: any free one, written to the run folder.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """Limits on waiting, how membership may change, and what is kept for when it does."""

    stall_limit_s: float = _doc(
        60.0, "No wait inside the trainer is longer; every other deadline derives from it."
    )
    lease_limit_s: float = _doc(
        3.0, "A worker that has not answered for so long is lost; at most `stall_limit_s`."
    )
    min_workers: int | None = _doc(
        None,
        "Fewest workers to train with; below, training waits. null: `cluster.num_workers`, which "
        "is the most.",
    )
    num_spares: int = _doc(
        0, "Started, idle workers beyond those that train, to take a lost one's place."
    )
    max_failures: int = _doc(
        3, "Lost workers and other disturbances to survive in a row; -1: any number, 0: none."
    )
    max_preemptions: int = _doc(
        -1, "Announced departures of nodes to survive in a row; -1: any number."
    )
    refill_updates: int = _doc(
        100, "After so many committed updates without a new one, both budgets are full again."
    )
    snapshot_every: int = _doc(
        0,
        "Commit points between two snapshots in memory, kept by another worker too; 0: as often "
        "as pays when a stage is lost every ten minutes, under 2% of the time; -1: never.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsConfig:
    """What makes results reproducible bit for bit."""

    threads_per_stage: int = _doc(1, "Compute threads of each stage on CPU; part of the numerics.")
    check_finite: bool = _doc(True, "Check each stage's outputs for NaN and infinity.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is told."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
