"""What workers need of the cluster, and how many it can hold. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_trainer.config import ClusterConfig
from elastic_trainer.errors import ClusterError

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A living node of the cluster, as Ray knows it."""

    node_id: str
    ip: str
    name: str
    total: Resources


def bundles(
    config: ClusterConfig, cluster: Resources, num_workers: int | None = None
) -> list[dict[str, float]]:
    """Resources of each of so many workers (all that may train): as configured, else one GPU where
    the cluster has one left for it, else one CPU.

    Args:
        config: what each needs.
        cluster: total resources, as Ray counts them.
        num_workers: how many; `cluster.num_workers` if not given.

    Raises:
        ClusterError: a type of accelerator is asked for, and no worker has one.
    """
    count = config.num_workers if num_workers is None else num_workers
    if config.resources_per_worker:
        each = [dict(config.resources_per_worker) for _ in range(count)]
    else:
        num_gpus = int(cluster.get("GPU", 0))
        each = [{"GPU": 1.0} if i < num_gpus else {"CPU": 1.0} for i in range(count)]
    if config.accelerator_type:
        on_gpu = [bundle for bundle in each if bundle.get("GPU")]
        if not on_gpu:
            raise ClusterError(
                f"cluster.accelerator_type is {config.accelerator_type}, but no worker gets a GPU",
                "Ask for one in cluster.resources_per_worker, or leave cluster.accelerator_type "
                "null.",
            )
        for bundle in on_gpu:
            bundle[f"accelerator_type:{config.accelerator_type}"] = 0.001
    return each


def next_bundle(
    config: ClusterConfig, cluster: Resources, held: Sequence[Resources], fewest: int
) -> dict[str, float]:
    """Resources of one more worker, beside those that hold, or were promised, `held`.

    Where there are GPUs, workers beyond the fewest that are needed wait for one: a CPU would only
    slow the pipeline down.

    Raises:
        ClusterError: as `bundles`.
    """
    if len(held) >= fewest and not config.resources_per_worker and cluster.get("GPU"):
        return bundles(config, {"GPU": 1.0}, 1)[0]
    wanted = bundles(config, cluster, len(held) + 1)
    for taken in held:
        if taken in wanted and len(wanted) > 1:
            wanted.remove(dict(taken))
    return wanted[0]


def capacity(config: ClusterConfig, nodes: Iterable[Node]) -> int:
    """How many workers these nodes could hold if nothing else ran there."""
    return sum(_fitting(config, node.total) for node in nodes)


def _fitting(config: ClusterConfig, total: Resources) -> int:
    if not config.resources_per_worker:
        return int(total.get("GPU", 0)) + int(total.get("CPU", 0))
    need = {kind: amount for kind, amount in config.resources_per_worker.items() if amount > 0}
    return int(min((total.get(kind, 0) / amount for kind, amount in need.items()), default=0))


def no_room(wanted: Sequence[Resources], total: Resources, free: Resources, waited_s: float) -> str:
    """That the cluster cannot hold workers with these needs: what was asked, and what is there."""
    kinds = sorted({kind for bundle in wanted for kind in bundle})
    asked = ", ".join(f"{kind} {sum(b.get(kind, 0) for b in wanted):g}" for kind in kinds)
    there = ", ".join(
        f"{kind} {free.get(kind, 0):g} free of {total.get(kind, 0):g}" for kind in kinds
    )
    return (
        f"the cluster has no room for {len(wanted)} workers after {waited_s:.0f} s: "
        f"asked for {asked}; there is {there}"
    )
