"""What others ask of a running run, from other threads: refused clearly, or handed on."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_trainer.actors.departures import Departures
from elastic_trainer.actors.resources import capacity
from elastic_trainer.actors.site import Site
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config, fixed_stages
from elastic_trainer.elastic import events as ev
from elastic_trainer.errors import ClusterError, ConfigError, RunError


class Run(Protocol):
    """What is to be known of the run."""

    run_name: str

    @property
    def is_ending(self) -> bool: ...
    @property
    def num_layers(self) -> int | None: ...


class Requests:
    """Checks requests against the run and its cluster."""

    def __init__(
        self,
        run: Run,
        config: Config,
        site: Site,
        crew: Crew,
        departures: Departures,
        report: Callable[[ev.Event], None],
    ) -> None:
        self._run = run
        self._config = config
        self._site = site
        self._crew = crew
        self._departures = departures
        self._report = report

    def scale(self, fewest: int, most: int) -> Mapping[str, Any]:
        """Go on with `fewest` to `most` workers from the next commit point.

        Raises:
            RunError: the run is ending.
            ConfigError: no such number can train this model as it is configured.
            ClusterError: the cluster cannot hold the fewest.
        """
        self._check_running()
        layers, fixed = self._run.num_layers, fixed_stages(self._config)
        if fewest < 1 or fewest > most:
            raise ConfigError(f"{fewest} to {most} workers is no range", "Give N or MIN:MAX.")
        if fixed is not None and not fewest <= fixed <= most:
            raise ConfigError(
                f"this run is fixed at {fixed} stages, so it cannot train with "
                f"{fewest if fewest == most else f'{fewest}:{most}'} workers",
                "pipeline.num_stages or pipeline.cuts say so in its configuration.",
            )
        if layers is not None and fewest > layers:
            raise ConfigError(
                f"{fewest} workers, but the model has only {layers} layers",
                f"Ask for at most {layers}, or for a range that begins there.",
            )
        nodes = [n for n in self._site.nodes() if n.node_id not in self._crew.avoided]
        if fewest > (room := capacity(self._config.cluster, nodes)):
            raise ClusterError(
                f"the cluster can hold {room} workers of this run at most, not {fewest}",
                f"Add nodes first, or ask for {min(room, most)}:{most} to grow when they come.",
            )
        self._report(
            ev.ScaleRequested(
                min_workers=fewest,
                max_workers=most,
                reason=f"{fewest if fewest == most else f'{fewest} to {most}'} workers asked for",
            )
        )
        there = len(self._crew.stages)
        return {"min_workers": fewest, "max_workers": most, "num_workers": there}

    def drain(self, node: str, deadline_s: float | None) -> Mapping[str, Any]:
        """Move all layers off a node at the next commit point, and keep away from it.

        Args:
            node: its address, its name or its id in Ray.
            deadline_s: when it goes; None: when the layers have moved.

        Raises:
            RunError: the run is ending.
            ClusterError: there is no such node.
        """
        self._check_running()
        nodes = self._site.nodes()
        meant = [n for n in nodes if node in (n.ip, n.name, n.node_id)]
        if not meant:
            known = ", ".join(sorted({n.ip for n in nodes})) or "none"
            raise ClusterError(f"there is no node {node} in the cluster", f"Its nodes: {known}.")
        ids = {n.node_id for n in meant}
        workers = self._crew.on_nodes(ids)
        self._departures.request(ids, f"node {meant[0].ip} is to be left", deadline_s)
        return {"node": meant[0].ip, "workers": workers}

    def _check_running(self) -> None:
        if self._run.is_ending:
            raise RunError(f"{self._run.run_name} is ending", "It takes no more requests.")
