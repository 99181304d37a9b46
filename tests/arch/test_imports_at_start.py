"""What a user waits for: programs that start or control runs load no torch."""

import subprocess
import sys

import pytest

PROGRAM = "import sys; sys.modules['torch'] = None; import {}"


@pytest.mark.parametrize(
    "module", ["elastic_trainer.cli", "elastic_trainer.run", "elastic_trainer.actors.coordinator"]
)
def test_torch_is_not_loaded(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
