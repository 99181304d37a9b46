"""A model that asks for what the data does not have is told so."""

from typing import Any

import pytest

from elastic_trainer.actors.loader import Loader
from elastic_trainer.config import load_config
from elastic_trainer.errors import DataError
from elastic_trainer.types import Cursor


def test_a_field_that_the_data_lacks_is_named(tmp_path: Any) -> None:
    base = {
        "model": {"name": "emulated"},
        "data": {"format": "synthetic", "sequence_length": 4},
        "train": {"global_batch_size": 4},
    }
    loader = Loader("loader-0", load_config(base, []), str(tmp_path))
    try:
        loader.configure(1, {}, {"vision_cost": ["stage-0"]}, Cursor(), 1)
        with pytest.raises(DataError, match="asks for field 'vision_cost', which the data"):
            loader.prepare(1, 1, 1)
    finally:
        loader.close()
