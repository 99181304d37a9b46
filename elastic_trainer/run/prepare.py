"""Everything that is checked before anything starts: configuration, data, folder, resume point."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elastic_trainer.actors.saving import check_same_data, checkpoint_root
from elastic_trainer.checkpoint.resume import ResumePoint, resolve_resume
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import (
    Config,
    fewest_workers,
    load_config,
    parse_workers,
    recipe_names,
)
from elastic_trainer.data.info import describe
from elastic_trainer.errors import CheckpointError, ConfigError, PlanError, RunError
from elastic_trainer.models import outline
from elastic_trainer.observability.record import CONFIG_FILE, is_alive, new_run_name
from elastic_trainer.observability.runs import is_run
from elastic_trainer.run.cluster import resolve_address
from elastic_trainer.types import Cursor

OptionalPath = TypeVar("OptionalPath", str, str | None)
Source = str | Path | Mapping[str, Any] | Config | None
FAST_DEV_RUN = (  # every part runs once, in seconds
    "train.max_steps=3",
    "train.eval_steps=2",
    "train.eval_batches=1",
    "checkpoint.every_steps=2",
    "pipeline.segment_updates=1",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A run that may start: all of it has been checked.

    `num_layers` is None where only the workers can tell, or `check_model` has not been asked yet.
    """

    config: Config
    name: str
    run_dir: Path
    update: int
    cursor: Cursor
    checkpoint: str | None
    num_layers: int | None
    notes: tuple[str, ...]


def resolve_config(
    source: Source,
    overrides: Sequence[str],
    *,
    workers: int | str | None = None,
    address: str | None = None,
    fast_dev_run: bool = False,
) -> Config:
    """The configuration with the command's options, and what the data decides, filled in."""
    extra = []
    if workers is not None:
        fewest, most = parse_workers(workers)
        extra = [f"elastic.min_workers={fewest}", f"cluster.num_workers={most}"]
    if address is not None:
        extra.append(f"cluster.address={address}")
    if fast_dev_run:
        extra.extend(FAST_DEV_RUN)
    config = load_config(source, [*overrides, *extra])
    data = describe(config)
    args = dict(config.model.args)
    is_language = config.model.target is None and config.model.name in ("gpt", "multimodal")
    if is_language and data.vocab_size is not None:
        args.setdefault("vocab_size", data.vocab_size)
    return replace(
        config,
        model=replace(config.model, args=args),
        data=replace(
            config.data,
            path=_absolute(config.data.path),
            eval_path=_absolute(config.data.eval_path),
            tokenizer=_absolute(config.data.tokenizer),
        ),
        checkpoint=replace(
            config.checkpoint, storage_path=_absolute(config.checkpoint.storage_path)
        ),
    )


def _absolute(path: OptionalPath) -> OptionalPath:
    """A local path that means the same in the workers' folders, and later in others."""
    return path if path is None or "://" in path else str(Path(path).absolute())


def prepare(
    source: Source,
    overrides: Sequence[str],
    *,
    workers: int | str | None = None,
    address: str | None = None,
    run_dir: str | Path | None = None,
    resume: str | None = None,
    fast_dev_run: bool = False,
    with_model: bool = True,
) -> Launch:
    """Check everything that can be checked without a cluster.

    Args:
        with_model: load the model, too, which takes seconds; else `check_model` is left to do.

    Raises:
        ElasticTrainerError: what is wrong and what to do.
    """
    config = resolve_config(
        source, overrides, workers=workers, address=address, fast_dev_run=fast_dev_run
    )
    num_layers = check_model(config) if with_model else None
    _check_port(config)
    label = config.model.target.rpartition(":")[2] if config.model.target else config.model.name
    name = config.run.name or new_run_name(label, time.time())
    if run_dir is None and resume is not None:
        run_dir = _run_of(source, overrides)
    folder = Path(run_dir) if run_dir is not None else Path(config.run.storage_path) / name
    folder = folder.absolute()
    if is_run(folder):
        if is_alive(folder):
            raise RunError(
                f"a trainer is already running in {folder}",
                "Choose another --run-dir, or stop it: `elastic-trainer stop RUN`.",
            )
        if resume is None:
            raise RunError(
                f"{folder} already holds a run",
                "Continue it with `--resume auto`, or choose another --run-dir.",
            )
    store = CheckpointStore(checkpoint_root(config, folder))
    point = _resume_point(store, resume) if resume is not None else None
    if point is not None:
        check_same_data(config, point.manifest)
    goes_on = resume == "auto" or (point is not None and point.store.root == store.root)
    if not is_run(folder) and not goes_on and (others := store.newest()) is not None:
        raise RunError(
            f"{store.storage.label()} holds checkpoints of another run (update {others.update})",
            "Choose another run.name or --run-dir, whose last part names the folder there, or "
            "continue that run with `--resume auto`.",
        )
    return Launch(
        config=config,
        name=folder.name,
        run_dir=folder,
        update=point.manifest.update if point else 0,
        cursor=point.manifest.cursor if point else Cursor(),
        checkpoint=point.store.root if point else None,
        num_layers=num_layers,
        notes=(*_notes(resume, point), *_warnings(config)),
    )


def _run_of(source: Source, overrides: Sequence[str]) -> Path | None:
    """The run folder whose configuration `source` is: going on from there means that run."""
    if not isinstance(source, str | Path) or str(source) in recipe_names():
        return None
    if any(override.startswith("run.") for override in overrides):
        return None  # another place was asked for
    path = Path(source)
    folder = path.parent if path.name == CONFIG_FILE and path.is_file() else path
    return folder if is_run(folder) else None


def _resume_point(store: CheckpointStore, resume: str) -> ResumePoint | None:
    """What `--resume` names; a run folder leads to where that run keeps its checkpoints."""
    if resume == "auto" or resume.isdecimal() or not (Path(resume) / CONFIG_FILE).is_file():
        return resolve_resume(store, resume)
    folder = Path(resume)
    root = checkpoint_root(load_config(folder / CONFIG_FILE), folder)
    point = resolve_resume(CheckpointStore(root), "auto")
    if point is None:
        raise CheckpointError(
            f"the run in {folder} has no complete checkpoint", "Start it anew without `--resume`."
        )
    return point


def leaves_model_to_workers(config: Config) -> bool:
    """Whether only the workers look at the model before it runs: its module may be on a cluster's
    nodes only, and Hugging Face's library takes long to load."""
    is_hf = config.model.target is None and config.model.name == "hf"
    return is_hf or resolve_address(config.cluster.address) != "local"


def must_run_code(config: Config) -> bool:
    """Whether a user's own code must be loaded to look at the model; raises nothing."""
    is_own = config.model.target is not None or config.loss.target is not None
    return is_own and not leaves_model_to_workers(config)


def check_model(config: Config) -> int | None:
    """Refuse what the workers would refuse, before there are any.

    Returns how many layers the model has, None if it is left to the workers.

    Raises:
        PlanError: it has fewer layers than the run has workers at the least.
        ModelError: it cannot be imported or built.
    """
    if leaves_model_to_workers(config):
        return None
    num_layers, fewest = outline.num_layers(config), fewest_workers(config)
    if num_layers is None:
        from elastic_trainer.models.registry import load_model  # torch: takes seconds to load

        num_layers = len(load_model(config).layers)
    if fewest > num_layers:
        raise PlanError(
            f"{fewest} stages, but the model has only {num_layers} layers",
            f"Use at most {num_layers} workers (cluster.num_workers).",
        )
    return num_layers


def _check_port(config: Config) -> None:
    """The coordinator will serve metrics on this node: see that the port is free."""
    host, port = config.metrics.host, config.metrics.port
    if not config.metrics.enabled or not port:
        return
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror or error}",
            "Choose another metrics.port (0: any free one) or metrics.host.",
        ) from error


def _warnings(config: Config) -> tuple[str, ...]:
    """What is allowed, but probably not meant."""
    if config.train.max_steps is None and config.optim.lr_schedule != "constant":
        return (
            f"optim.lr_schedule={config.optim.lr_schedule} has no end to fall towards: the "
            "learning rate stays at its peak; set train.max_steps to let it fall",
        )
    return ()


def _notes(resume: str | None, point: Any) -> tuple[str, ...]:
    if resume is None:
        return ()
    if point is None:
        return ("nothing to resume from: starting at update 0",)
    passed = [f"passed over: {reason}" for reason in point.passed_over]
    return (*passed, f"resuming from update {point.manifest.update}")
