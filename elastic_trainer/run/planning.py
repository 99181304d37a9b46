"""What a run would do, without a cluster: `elastic-trainer plan` and `train --dry-run`."""

from collections.abc import Sequence

import torch

from elastic_trainer.actors.loader import update_batch_size
from elastic_trainer.actors.planning import (
    load_profile,
    own_cores,
    plan_for,
    profile_facts,
    profile_key,
    store_profile,
)
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.media import decoders
from elastic_trainer.models.registry import load_model, ties
from elastic_trainer.pipeline.overheads import with_messages
from elastic_trainer.pipeline.profiler import device_class, profile_layers
from elastic_trainer.run.cluster import add_working_folder
from elastic_trainer.run.prepare import Source, prepare, resolve_config
from elastic_trainer.transport.zmq_channel import ZmqChannel
from elastic_trainer.types import Plan


def plan_command(
    source: Source, overrides: Sequence[str], workers: int | str | None = None
) -> tuple[Config, Plan]:
    """Profile here (or take the cached profile) and plan, for workers like this machine.

    Raises:
        PlanError: no plan fits.
    """
    add_working_folder()
    config = resolve_config(source, overrides, workers=workers)
    model = load_model(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(config.numerics.threads_per_stage)
    memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else None
    description = {
        "memory_bytes": memory,
        "ties": [(t.owner, t.follower) for t in ties(model)],
        "device_class": device_class(device),
        "cores": own_cores() if device.type == "cpu" else None,
        "layers": model.names,
        "profile_facts": profile_facts(config),
    }
    with decoders.kept():
        _, (sample, *_) = next(BatchStream(config, "train", update_batch_size(config)))
    key = profile_key(config, description, sample)
    profile = load_profile(key)
    if profile is None:
        fields = {name: torch.from_numpy(array) for name, array in sample.items()}
        profile = with_messages(profile_layers(model, config, fields, device), ZmqChannel)
        store_profile(key, profile)
    names = [f"stage-{i}" for i in range(config.cluster.num_workers)]
    return config, plan_for(config, profile, names, 1, dict.fromkeys(names, description))


def dry_run(
    source: Source,
    overrides: Sequence[str],
    *,
    workers: int | str | None = None,
    address: str | None = None,
    run_dir: str | None = None,
    resume: str | None = None,
    fast_dev_run: bool = False,
) -> tuple[Config, Plan]:
    """Check everything that `train` checks before it starts, and plan.

    Raises:
        ElasticTrainerError: what `train` would refuse.
    """
    add_working_folder()
    launch = prepare(
        source,
        overrides,
        workers=workers,
        address=address,
        run_dir=run_dir,
        resume=resume,
        fast_dev_run=fast_dev_run,
    )
    return plan_command(launch.config, ())
