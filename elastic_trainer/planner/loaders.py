"""Which loader feeds which stage."""

from collections.abc import Mapping

from elastic_trainer.types import WorkerId


def assign_loaders(
    stages: Mapping[int, str], loaders: Mapping[WorkerId, str]
) -> dict[WorkerId, tuple[int, ...]]:
    """The stages of each loader, in order; a loader for which none is left has none.

    Data should not cross the network once it is decoded, so a stage gets a loader of its own node
    where there is one. Beyond that each loader gets as many stages as any other.

    Args:
        stages: the node of each stage that needs data.
        loaders: the node of each loader, one at least. Where nothing else decides, the first ones
            are taken.
    """
    found: dict[WorkerId, list[int]] = {loader: [] for loader in loaders}
    near = {s: [w for w, at in loaders.items() if at == node] for s, node in stages.items()}
    # The stages that are free to choose come last: they even out what the others leave uneven.
    for stage in sorted(stages, key=lambda s: (not near[s], s)):
        chosen = min(near[stage] or loaders, key=lambda loader: len(found[loader]))
        found[chosen].append(stage)
    return {loader: tuple(sorted(held)) for loader, held in found.items()}
