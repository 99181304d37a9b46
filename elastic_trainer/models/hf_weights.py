"""Weights of a local folder in Hugging Face's layout, read tensor by tensor. Never a pickle."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from elastic_trainer.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class FolderWeights:
    """Where each tensor of the folder lies.

    Args:
        path: the folder.
        prefix: name of the base model, which some files leave out of their tensors' names.
    """

    def __init__(self, path: str, prefix: str) -> None:
        self._folder = Path(path)
        self._prefix = f"{prefix}."
        self._files = self._locate()

    def copy(self, name: str, otherwise: str | None, target: Tensor) -> None:
        """Fill `target` with tensor `name`, or with `otherwise` where the file has no `name`."""
        for wanted in (name, otherwise):
            for candidate in (wanted, wanted.removeprefix(self._prefix)) if wanted else ():
                if candidate in self._files:
                    self._read(candidate, target)
                    return
        raise ModelError(
            f"{self._folder} has no tensor {name!r}",
            "The weights do not belong to its config.json",
        )

    def _locate(self) -> dict[str, str]:
        if (self._folder / INDEX).is_file():
            index: dict[str, str] = json.loads((self._folder / INDEX).read_text())["weight_map"]
            return index
        if not (self._folder / SINGLE).is_file():
            raise ModelError(
                f"{self._folder} has no {SINGLE}",
                "Save the weights as safetensors, or set model.args.pretrained=false to start anew",
            )
        with self._open(SINGLE) as file:
            return {name: SINGLE for name in file.keys()}  # noqa: SIM118

    def _open(self, name: str) -> "safe_open":
        try:
            return safe_open(self._folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._folder / name} is damaged: {error}") from error

    def _read(self, name: str, target: Tensor) -> None:
        with self._open(self._files[name]) as file:
            tensor = file.get_tensor(name)
        if tensor.shape != target.shape:
            raise ModelError(
                f"{self._folder}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {tuple(target.shape)}"
            )
        target.copy_(tensor)
