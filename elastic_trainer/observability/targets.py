"""The file by which Prometheus finds a run (`file_sd_configs`)."""

import socket
from pathlib import Path

from elastic_trainer.observability.record import dump_json, write_atomically

ANY_ADDRESS = ("0.0.0.0", "::", "")


def write_targets(path: str | Path, address: tuple[str, int], run: str) -> None:
    """Name the run's /metrics to Prometheus; replaced atomically, since it is polled."""
    host, port = address
    if host in ANY_ADDRESS:
        host = socket.gethostname()
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    group = {"labels": {"job": "elastic-trainer", "run": run}, "targets": [target]}
    write_atomically(Path(path), dump_json([group], indent=2) + "\n")


def clear_targets(path: str | Path) -> None:
    """Tell Prometheus that there is nothing to scrape any more."""
    write_atomically(Path(path), "[]\n")
