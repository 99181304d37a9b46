"""The shipped recipes name models that can be built and split over their workers."""

import pytest

from elastic_trainer.config import load_config, recipe_names
from elastic_trainer.models.registry import load_model
from elastic_trainer.run.prepare import FAST_DEV_RUN


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_builds_enough_layers_for_its_workers(name: str) -> None:
    config = load_config(name)
    if config.data.format == "media":  # its vocabulary is known once the dataset is there
        config = load_config(name, ["model.args.vocab_size=512"])
    model = load_model(config)
    assert len(model.layers) >= config.cluster.num_workers


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_suits_a_fast_dev_run(name: str) -> None:
    config = load_config(name, FAST_DEV_RUN)
    assert config.train.max_steps == 3


def test_the_main_recipe_has_a_few_million_parameters() -> None:
    model = load_model(load_config("gpt"))
    count = sum(p.numel() for spec in model.layers for p in spec.build().parameters())
    assert 3e6 < count < 8e6
