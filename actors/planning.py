"""From measured profiles to a plan: the cache on disk around the pure planner."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic_trainer.config import Config
from elastic_trainer.planner.plan import commit_every, make_plan
from elastic_trainer.schedule.build import is_asynchronous
from elastic_trainer.types import LayerProfile, Plan, Profile, WorkerId
from elastic_trainer.version import __version__

SEGMENT_S = 1.0  # a synchronous segment lasts about this long
MAX_SEGMENT_UPDATES = 64


def cache_folder() -> Path:
    """Where profiles are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elastic-trainer" / "profiles"


def profile_key(config: Config, device_class: str, layers: Sequence[str]) -> str:
    """Digest of everything that layer times depend on."""
    facts: dict[str, Any] = {
        "model": asdict(config.model),
        "loss": asdict(config.loss),
        "layers": list(layers),
        "sequence_length": config.data.sequence_length,
        "microbatch_size": config.pipeline.microbatch_size,
        "precision": config.train.precision,
        "threads": config.numerics.threads_per_stage,
        "device_class": device_class,
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def load_profile(key: str) -> Profile | None:
    """A cached profile, None when there is none that can be read."""
    try:
        data = json.loads((cache_folder() / f"{key}.json").read_text())
        layers = tuple(LayerProfile(**layer) for layer in data.pop("layers"))
        return Profile(layers=layers, **data)
    except (OSError, ValueError, TypeError):
        return None


def store_profile(key: str, profile: Profile) -> None:
    """Keep a profile for the next run; a cache that cannot be written costs only time."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{key}.{os.getpid()}.part"
        part.write_text(json.dumps(asdict(profile)))
        part.replace(folder / f"{key}.json")
    except OSError:
        return


def plan_for(
    config: Config,
    profile: Profile,
    workers: Sequence[WorkerId],
    generation: int,
    descriptions: Mapping[WorkerId, Mapping[str, Any]],
) -> Plan:
    """The plan for these workers.

    Args:
        descriptions: what each worker said of itself: memory and the model's ties.
    """
    first = descriptions[workers[0]]
    return make_plan(
        profile,
        config,
        workers,
        generation,
        [tuple(pair) for pair in first["ties"]],
        [descriptions[w]["memory_bytes"] for w in workers],
    )


def segment_updates(config: Config, plan: Plan) -> int:
    """Updates per segment: what the pipe needs between drains, or about a second's worth."""
    if is_asynchronous(plan.schedule):
        return commit_every(plan.num_stages, config.pipeline.commit_every)
    if config.pipeline.segment_updates:
        return config.pipeline.segment_updates
    return max(1, min(MAX_SEGMENT_UPDATES, round(SEGMENT_S / max(plan.predicted.step_s, 1e-6))))
