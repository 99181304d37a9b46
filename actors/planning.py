"""From measured profiles to a plan: the cache on disk around the pure planner."""

import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.config import Config
from elastic_trainer.planner.plan import commit_every, make_plan, stage_ties
from elastic_trainer.schedule.actions import ActionLists
from elastic_trainer.schedule.build import build, forward_only, is_asynchronous
from elastic_trainer.schedule.validate import validate
from elastic_trainer.types import LayerProfile, Overheads, Plan, Profile, WorkerId
from elastic_trainer.version import __version__

SHIPPED_MODELS = "elastic_trainer.models.registry"
SEGMENT_S = 2.0  # a synchronous segment lasts about this long
MAX_SEGMENT_UPDATES = 64
PROFILE_FORMAT = 5  # counts up when profiles measure something else


def cache_folder() -> Path:
    """Where profiles are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elastic-trainer" / "profiles"


def profile_facts(config: Config) -> dict[str, str]:
    """What layer times depend on, as only the process knows it that measures them."""
    code = hashlib.sha256()
    for target in (config.model.target, config.loss.target):
        for file in _sources(target or SHIPPED_MODELS):
            code.update(file.read_bytes())
    for value in config.model.args.values():  # such as a folder with a Hugging Face model
        for file in (Path(str(value)), Path(str(value)) / "config.json"):
            if isinstance(value, str) and file.is_file():
                code.update(file.read_bytes())
    return {"code": code.hexdigest(), "cpu": _cpu_model(), "torch": version("torch")}


def profile_key(
    config: Config, description: Mapping[str, Any], sample: Mapping[str, "np.ndarray[Any, Any]"]
) -> str:
    """Digest of everything that layer times depend on.

    Args:
        config: model, precision and so on.
        description: what the worker that measures said of itself.
        sample: the microbatch that is measured.
    """
    facts: dict[str, Any] = {
        "model": asdict(config.model),
        "loss": asdict(config.loss),
        "layers": list(description["layers"]),
        "sample": {name: [str(a.dtype), list(a.shape)] for name, a in sample.items()},
        "facts": description["profile_facts"],
        "sequence_length": config.data.sequence_length,
        "microbatch_size": config.pipeline.microbatch_size,
        "precision": config.train.precision,
        "threads": config.numerics.threads_per_stage,
        "device_class": description["device_class"],
        "optim": config.optim.name,
        "split_backward": config.pipeline.split_backward,
        "format": PROFILE_FORMAT,
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _sources(target: str) -> list[Path]:
    """The file of a `module:function`, and those beside it that it may import."""
    try:
        spec = importlib.util.find_spec(target.partition(":")[0])
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin is None or not spec.has_location:
        return []
    return sorted(Path(spec.origin).parent.glob("*.py"))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def load_profile(key: str) -> Profile | None:
    """A cached profile, None when there is none that can be read."""
    try:
        data = json.loads((cache_folder() / f"{key}.json").read_text())
        layers = tuple(LayerProfile(**layer) for layer in data.pop("layers"))
        return Profile(layers=layers, overheads=Overheads(**data.pop("overheads")), **data)
    except (OSError, ValueError, TypeError, KeyError):
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
        descriptions: what each worker said of itself: memory, cores and the model's ties.
    """
    first = descriptions[workers[0]]
    return make_plan(
        profile,
        config,
        workers,
        generation,
        [tuple(pair) for pair in first["ties"]],
        [descriptions[w]["memory_bytes"] for w in workers],
        [_cores(descriptions[w]) for w in workers],
    )


def _cores(description: Mapping[str, Any]) -> tuple[str, int] | None:
    """A worker's node and the cores there, if it computes on them."""
    count = description.get("cores")
    return None if count is None else (str(description.get("node_ip", "")), count)


def own_cores() -> int:
    """How many cores the processes of this one's node may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def segment_updates(config: Config, plan: Plan) -> int:
    """Updates per segment: what the pipe needs between drains, or about two seconds' worth."""
    if is_asynchronous(plan.schedule):
        return commit_every(plan.num_stages, config.pipeline.commit_every)
    if config.pipeline.segment_updates:
        return config.pipeline.segment_updates
    return max(1, min(MAX_SEGMENT_UPDATES, round(SEGMENT_S / max(plan.predicted.step_s, 1e-6))))


def longest_action_s(plan: Plan) -> float:
    """What the longest single action is expected to take: no more than a forward and a backward."""
    return max(plan.predicted.stage_busy_s) / plan.num_microbatches


def routes(
    plan: Plan, descriptions: Mapping[WorkerId, Mapping[str, Any]]
) -> dict[str, list[WorkerId]]:
    """Which field of a microbatch goes to which workers."""
    first = descriptions[plan.stages[0].worker]
    found: dict[str, list[WorkerId]] = {}
    for name in first["input_fields"]:
        found.setdefault(name, []).append(plan.stages[0].worker)
    for name in first["label_fields"]:
        found.setdefault(name, []).append(plan.stages[-1].worker)
    for stage in plan.stages:
        for names in first["batch_fields"][stage.first : stage.stop]:
            for name in names:
                found.setdefault(name, []).append(stage.worker)
    return {name: list(dict.fromkeys(workers)) for name, workers in found.items()}


class Schedules:
    """Action lists for the segments of one plan; each shape is validated before its first use.

    Args:
        config: says whether stages must agree on a gradient norm.
        plan: schedule and stages.
        ties: (owner, follower) indices of layers that share a parameter.
    """

    def __init__(self, config: Config, plan: Plan, ties: Sequence[tuple[int, int]]) -> None:
        self._plan = plan
        self._ties = stage_ties(plan.stages, ties)
        self._asynchronous = is_asynchronous(plan.schedule)
        needs_norm = config.train.max_grad_norm > 0 or config.train.precision == "fp16"
        self._reduce = needs_norm and not self._asynchronous
        self._valid: set[tuple[int, ...]] = set()

    def train(self, groups: Sequence[int]) -> ActionLists:
        """Actions of a segment whose updates have these numbers of microbatches.

        Raises:
            ScheduleError: the schedule would deadlock, or trains wrongly.
        """
        num_stages = self._plan.num_stages
        options: dict[str, Any] = {"ties": self._ties, "reduce": self._reduce}
        actions = build(self._plan.schedule, num_stages, groups, **options)
        if (shape := tuple(groups)) not in self._valid:
            validate(actions, num_stages, groups, asynchronous=self._asynchronous, **options)
            self._valid.add(shape)
        return actions

    def evaluate(self, groups: Sequence[int]) -> ActionLists:
        """Actions of an evaluation."""
        return forward_only(self._plan.num_stages, sum(groups))
