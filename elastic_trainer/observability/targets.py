"""The files by which Prometheus finds a run (`file_sd_configs`).

Each run has one in its folder, `RUN/prometheus/targets.json`. Prometheus takes a `*` only in the
last part of a path, so no pattern covers the files of all runs. Where a folder `prometheus` lies
beside the run folders, runs therefore register there too, as `prometheus/RUN.json`.
"""

import socket
from pathlib import Path

from elastic_trainer.observability.lines import dump_json
from elastic_trainer.observability.record import write_atomically

ANY_ADDRESS = ("0.0.0.0", "::", "")
SHARED_FOLDER = "prometheus"


def write_targets(path: str | Path, address: tuple[str, int], run: str) -> None:
    """Name the run's /metrics to Prometheus; replaced atomically, since it is polled.

    Args:
        path: the run's own file, `RUN/prometheus/targets.json`.
        address: host and port that serve it.
        run: name of the run.
    """
    host, port = address
    if host in ANY_ADDRESS:
        host = socket.gethostname()
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    group = {"labels": {"job": "elastic-trainer", "run": run}, "targets": [target]}
    text = dump_json([group], indent=2) + "\n"
    write_atomically(Path(path), text)
    shared = _shared_file(Path(path))
    if shared.parent.is_dir():
        write_atomically(shared, text)


def clear_targets(path: str | Path) -> None:
    """Tell Prometheus that there is nothing to scrape any more."""
    write_atomically(Path(path), "[]\n")
    _shared_file(Path(path)).unlink(missing_ok=True)


def _shared_file(path: Path) -> Path:
    run_dir = path.absolute().parents[1]
    return run_dir.parent / SHARED_FOLDER / f"{run_dir.name}.json"
