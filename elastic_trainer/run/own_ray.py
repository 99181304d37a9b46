"""A Ray of our own for one run, without the helpers that nobody would ask anything.

`ray.init` starts an autoscaler, a dashboard (a small one even if it is told to leave it out), a log
monitor and a full agent on each node, all of which load Ray's libraries before the first worker may
start, while the user waits. Ray has no options for it, so methods of its node are replaced while it
starts. A Ray that has no such methods starts as it likes.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

# A Ray that lives for one run has nobody to report to: measured, its reports took 7% of a core.
# And Ray runs workers at a low priority, behind whatever else goes on here; these are what the user
# waits for.
SETTINGS = {
    "enable_metrics_collection": False,
    "task_events_report_interval_ms": 0,
    "event_stats": False,
    "worker_niceness": 0,
}
HELPERS = ("start_monitor", "start_api_server", "start_log_monitor")


@contextlib.contextmanager
def without_helpers() -> Iterator[None]:
    """What `ray.init` starts in this block are the GCS, a raylet with its agents, and workers."""
    import ray._private.node
    import ray._private.utils

    node, utils = ray._private.node.Node, ray._private.utils
    with contextlib.ExitStack() as stack:
        for name in HELPERS:
            if hasattr(node, name):
                stack.enter_context(mock.patch.object(node, name, _start_nothing))
        # The agent is started as where the dashboard's own dependencies are not installed.
        if hasattr(utils, "get_dashboard_dependency_error"):
            patch = mock.patch.object(utils, "get_dashboard_dependency_error", _no_dashboard)
            stack.enter_context(patch)
        yield


def _start_nothing(*_args: Any, **_options: Any) -> None:
    return None


def _no_dashboard() -> Exception:
    return ImportError("no dashboard is needed")


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Start processes in this block with these variables.

    Ray starts workers ahead of need, and an actor that asks for other variables than these have
    would wait for one of its own.
    """
    with mock.patch.dict(os.environ, variables):
        yield
