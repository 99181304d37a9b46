"""Reading a configuration: `configs/default.yaml`, then CONFIG, then `key=value` overrides.

Later layers win setting by setting. Mappings such as `model.args` are merged, except that choosing
another model starts its arguments afresh and that an override `model.args={…}` replaces them.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from elastic_trainer.config.aliases import explain_unknown
from elastic_trainer.config.schema import Config
from elastic_trainer.config.tree import build_config, check_keys, leaf_types, owner_of
from elastic_trainer.config.validate import validate
from elastic_trainer.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"

Source = str | Path | Mapping[str, Any] | Config | None
Tree = dict[str, Any]


def load_config(source: Source = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, checked.

    Args:
        source: a YAML file, the bare name of a shipped recipe (`gpt`), a mapping, or None for the
            defaults alone.
        overrides: `key=value` texts, the value in YAML.
    """
    tree = _merge(_read_file(CONFIGS / "default.yaml"), _read_source(source))
    for override in overrides:
        _apply_override(tree, override)
    config = build_config(_resolve(tree))
    if config.train.max_steps is None and config.train.num_epochs is None:
        config = replace(config, train=replace(config.train, num_epochs=1))
    validate(config)
    return config


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in (CONFIGS / "recipes").glob("*.yaml"))


def to_mapping(config: Config) -> Tree:
    """The configuration as plain nested dicts."""
    return asdict(config)


def to_yaml(config: Config) -> str:
    """The configuration as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))


def _read_source(source: Source) -> Tree:
    if source is None:
        return {}
    if isinstance(source, Config):
        return to_mapping(source)
    if isinstance(source, Mapping):
        return _checked({str(key): value for key, value in source.items()})
    return _read_file(_find_file(source))


def _find_file(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    name = str(source)
    if name in recipe_names():
        return CONFIGS / "recipes" / f"{name}.yaml"
    if path.is_dir() and (path / "config.yaml").is_file():
        return path / "config.yaml"
    recipes = ", ".join(recipe_names())
    close = difflib.get_close_matches(path.stem, recipe_names(), n=1)
    meant = f"Did you mean the recipe `{close[0]}`? " if close else ""
    raise ConfigError(
        f"There is no configuration `{name}`",
        f"{meant}Give a YAML file or the name of a shipped recipe: {recipes}.",
    )


def _read_file(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read `{path}`: {_first_line(error)}") from error
    try:
        loaded = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or _first_line(error)
        raise ConfigError(f"`{path}` is not valid YAML{where}: {problem}") from error
    # A document of nothing but a word or comments parses to `{word: None}` or `{}` of its own.
    if not isinstance(loaded, dict):
        raise ConfigError(f"`{path}` must hold a mapping of settings, not a list")
    return _checked({str(key): value for key, value in loaded.items()})


def _checked(tree: Tree) -> Tree:
    """A copy with `{"a.b": 1}` at the top written as `{"a": {"b": 1}}` and only known keys."""
    nested: Tree = {}
    for key, value in tree.items():
        if "." in key:
            _set_path(nested, key, value)
        else:
            nested = _merge(nested, {key: value})
    # An empty section in YAML (`data:` with nothing below) is null: nothing is set there.
    nested = {key: {} if value is None else value for key, value in nested.items()}
    check_keys(nested)
    return nested


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Tree:
    """`lower` with `upper` over it; neither is changed."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = _merge(below, value)
        merged[key] = value
    return merged


def _apply_override(tree: Tree, override: str) -> None:
    """Set what `key=value` says in `tree`."""
    path, separator, text = override.partition("=")
    path = path.strip()
    if not separator or not path:
        raise ConfigError(f"`{override}` is not an override", "Write key=value without spaces.")
    setting = owner_of(path)
    if setting is None:
        raise explain_unknown(path, list(leaf_types()))
    value = _parse_value(setting if path == setting else "", text, override)
    section, _, name = path.partition(".")
    if path in ("model.name", "model.target") and value != tree[section].get(name):
        tree[section]["args"] = {}
    _set_path(tree, path, value)


def _parse_value(setting: str, text: str, override: str) -> Any:
    """The value of an override: YAML, but text settings take the characters as they stand."""
    hint = leaf_types().get(setting)
    is_optional = get_origin(hint) in (Union, UnionType)
    is_text = hint is str or (is_optional and str in get_args(hint))
    if is_text and not text.startswith(("'", '"')):
        return None if is_optional and text in ("null", "") else text
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"The value of `{override}` is not valid YAML") from error
    assert isinstance(parsed, dict)
    return parsed["value"]


def _set_path(tree: Tree, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        below = tree.get(name)
        tree[name] = dict(below) if isinstance(below, Mapping) else {}
        tree = tree[name]
    tree[leaf] = value


def _resolve(tree: Tree) -> Tree:
    """`tree` with `${…}` references replaced by what they refer to."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"The configuration cannot be resolved: {_first_line(error)}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
