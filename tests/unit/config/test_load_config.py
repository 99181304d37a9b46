"""Reading a configuration: precedence, types, and messages that lead to the right setting."""

from pathlib import Path

import pytest

from elastic_trainer.config import Config, load_config, recipe_names, to_mapping, to_yaml
from elastic_trainer.config.aliases import ALIASES
from elastic_trainer.config.load import CONFIGS
from elastic_trainer.config.tree import leaf_types
from elastic_trainer.errors import ConfigError


def message(source: object = None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_defaults_alone_train_one_epoch() -> None:
    config = load_config()
    assert config.train.num_epochs == 1
    assert to_mapping(config) == to_mapping(Config()) | {
        "train": to_mapping(Config())["train"] | {"num_epochs": 1}
    }


def test_a_limit_in_updates_is_not_cut_short_by_an_epoch() -> None:
    assert load_config(None, ["train.max_steps=7"]).train.num_epochs is None


def test_file_wins_over_default_and_override_over_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("train:\n  seed: 5\n  max_steps: 10\ndata:\n", encoding="utf-8")
    config = load_config(path, ["train.max_steps=1e3"])
    assert (config.train.seed, config.train.max_steps) == (5, 1000)
    assert config.train.global_batch_size == Config().train.global_batch_size


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(saved) == config
    assert load_config(tmp_path) == config, "a run folder stands for its saved configuration"
    assert load_config(config) == config


def test_mappings_are_read_with_dots_or_nested() -> None:
    nested = load_config({"train": {"max_steps": 3, "seed": 1}})
    assert load_config({"train.max_steps": 3, "train": {"seed": 1}}) == nested
    assert load_config({"run": {"storage_path": Path("a/b")}}).run.storage_path == "a/b"


def test_values_of_overrides_are_yaml_but_text_stays_text() -> None:
    config = load_config(
        None,
        [
            "run.name=1e3",
            "transport.encryption=off",
            "pipeline.cuts=[3]",
            "cluster.resources_per_worker={CPU: 2}",
            "model.args.dims=[1, 2]",
            "model.args.act=relu",
            "data.eval_path=null",
            'data.path="a b"',
        ],
    )
    assert config.run.name == "1e3"
    assert config.transport.encryption == "off"
    assert config.pipeline.cuts == [3]
    assert config.cluster.resources_per_worker == {"CPU": 2.0}
    assert config.model.args == {"dims": [1, 2], "act": "relu"}
    assert config.data.eval_path is None
    assert config.data.path == "a b"


def test_encryption_off_in_a_file_is_not_a_boolean(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("transport:\n  encryption: off\n", encoding="utf-8")
    assert load_config(path).transport.encryption == "off"


def test_arguments_belong_to_their_model() -> None:
    base = {"model": {"name": "gpt", "args": {"dim": 8, "vocab_size": 9}}}
    assert load_config(base, ["model.args.dim=16"]).model.args == {"dim": 16, "vocab_size": 9}
    assert load_config(base, ["model.args={dim: 16}"]).model.args == {"dim": 16}
    assert load_config(base, ["model.name=mlp"]).model.args == {}
    assert load_config(base, ["model.name=gpt"]).model.args["dim"] == 8
    assert load_config(base, ["model.target=a.b:c", "model.args.x=1"]).model.args == {"x": 1}


def test_references_between_settings() -> None:
    source = {"model": {"args": {"max_positions": "${data.sequence_length}"}}}
    assert load_config(source, ["data.sequence_length=64"]).model.args["max_positions"] == 64
    assert "nowhere" in message({"run": {"name": "${nowhere}"}})


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("train.max_step=1", "`train.max_steps`"),
        ("trian.seed=1", "`train.seed`"),
        ("optim.warmup_stesp=1", "`optim.warmup_steps`"),
        ("train.learning_rate=1", "`optim.learning_rate`"),
        ("global_batch=1", "`train.global_batch_size`"),
        ("train.seed.deep=1", "`train.seed`"),
        ("model=gpt", "`model.name`"),
        ("zebra=1", "docs/configuration.md"),
        ("per_device_train_batch_size=8", "`pipeline.microbatch_size`"),
        ("training.per_device_train_batch_size=8", "`pipeline.microbatch_size`"),
        ("--per-device-train-batch-size=8", "`pipeline.microbatch_size`"),
        ("train.gradient_accumulation_steps=2", "`train.global_batch_size`"),
        ("save_total_limit=2", "`checkpoint.num_to_keep`"),
        ("trainer.gradient_clip_val=1", "`train.max_grad_norm`"),
        ("parallelism.pipeline_parallel_degree=4", "`pipeline.num_stages`"),
        ("resume_from_checkpoint=true", "`--resume auto`"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_right_one(override: str, meant: str) -> None:
    path, _, value = override.partition("=")
    assert meant in message(None, override)
    if "deep" not in path and path != "model":
        assert meant in message({path: value}), "in a file as on the command line"


def test_every_alias_leads_to_a_setting_that_exists() -> None:
    for name, (ours, note) in ALIASES.items():
        assert ours in leaf_types() if ours else note, name


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.max_steps=soon", "`train.max_steps` must be a whole number, not the"),
        ("train.max_steps=1.5", "`train.max_steps` must be a whole number"),
        ("train.seed=true", "`train.seed` must be a whole number, not true"),
        ("model.recompute=1", "`model.recompute` must be true or false"),
        ("optim.learning_rate=.nan", "`optim.learning_rate` must be a finite number"),
        ("optim.learning_rate=null", "`optim.learning_rate` must be a number, not null"),
        ("pipeline.cuts=3", "`pipeline.cuts` must be a list"),
        ("pipeline.cuts=[1, x]", "`pipeline.cuts[1]` must be a whole number"),
        ("cluster.resources_per_worker={CPU: lots}", "`cluster.resources_per_worker.CPU` must be"),
        ("model.args=3", "`model.args` must be a mapping"),
        ("pipeline.cuts=[1", "not valid YAML"),
        ("no-equals", "`no-equals` is not an override"),
    ],
)
def test_a_wrong_value_names_its_setting(override: str, says: str) -> None:
    assert says in message(None, override)


def test_text_that_yaml_read_as_a_number_says_to_quote_it() -> None:
    assert "Put it in quotes: `'7'`" in message({"run": {"name": 7}})


def test_bad_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("train:\n  seed: [1\n", encoding="utf-8")
    assert "broken.yaml` is not valid YAML in line" in message(broken)
    broken.write_bytes(b"run:\n  name: \xff\xfe\n")
    assert "Cannot read" in message(broken)
    broken.write_text("- a\n- b\n", encoding="utf-8")
    assert "must hold a mapping" in message(broken)
    broken.write_text("train: 3\n", encoding="utf-8")
    assert "`train` must hold settings, not 3" in message(broken)
    broken.write_text("train:\n  seed: 1\n  seed: 2\n", encoding="utf-8")
    assert "duplicate key seed" in message(broken)
    broken.write_text("", encoding="utf-8")
    assert load_config(broken) == load_config()


def test_a_missing_file_names_the_recipes() -> None:
    text = message("gtp")
    assert "There is no configuration `gtp`" in text and "Did you mean the recipe `gpt`" in text
    assert "gpt-async" in message("some/where.yaml")


def test_default_yaml_holds_every_setting() -> None:
    text = (CONFIGS / "default.yaml").read_text(encoding="utf-8")
    for path in leaf_types():
        assert f"\n  {path.split('.')[1]}:" in text
