"""The check of a user's own model in a process of its own, beside the start of Ray.

It needs torch, and a process that loads torch does little else meanwhile. The process reads the
configuration as JSON and answers with one line of JSON: the number of layers, or an error.
"""

import json
import os
import subprocess
import sys
from typing import Any

from elastic_trainer import errors
from elastic_trainer.config import Config, load_config, to_mapping
from elastic_trainer.errors import ElasticTrainerError, ModelError
from elastic_trainer.run.cluster import add_working_folder
from elastic_trainer.run.prepare import check_model, must_run_code

MARK = "model-check:"  # a model's own module may print, too


class ModelCheck:
    """The check, under way; `result` waits for it.

    Where torch is loaded already or not needed, it is done at once and here.

    Raises:
        ElasticTrainerError: what `check_model` finds wrong, if it was done at once.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._num_layers: int | None = None
        if "torch" in sys.modules or not must_run_code(config):
            self._num_layers = check_model(config)
            return
        self._process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def result(self) -> int | None:
        """How many layers the model has, None if that is left to the workers.

        Raises:
            ElasticTrainerError: what `check_model` finds wrong.
        """
        if self._process is None:
            return self._num_layers
        limit_s = self._config.cluster.start_timeout_s + self._config.elastic.stall_limit_s
        try:
            asked = json.dumps(to_mapping(self._config))
            told, complaint = self._process.communicate(asked, limit_s)
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"the model was not built within {limit_s:.0f} s",
                "Does its module wait for something when it is imported?",
            ) from error
        finally:
            self.close()
        lines = [line for line in told.splitlines() if line.startswith(MARK)]
        if not lines:
            last = complaint.strip().splitlines()[-1:] or ["it said nothing"]
            raise ModelError(f"the process that builds the model to check it ended: {last[0]}")
        return _read(json.loads(lines[-1].removeprefix(MARK)))

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _read(answer: dict[str, Any]) -> int | None:
    if "error" not in answer:
        found: int | None = answer["num_layers"]
        return found
    raise getattr(errors, answer["error"])(answer["what"], answer["hint"])


def main() -> None:
    """What the process does."""
    add_working_folder()
    from elastic_trainer.models import registry  # noqa: F401 - loads torch before it is asked

    config = load_config(json.load(sys.stdin))
    try:
        answer: dict[str, Any] = {"num_layers": check_model(config)}
    except ElasticTrainerError as error:
        answer = {"error": type(error).__name__, "what": error.what, "hint": error.hint}
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
