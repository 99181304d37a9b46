"""Between plain nested dicts and the dataclass tree: known keys, types, paths in messages."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic_trainer.config.aliases import explain_unknown
from elastic_trainer.config.schema import Config
from elastic_trainer.errors import ConfigError


@cache
def leaf_types() -> dict[str, Any]:
    """Dotted path of every setting -> its annotated type, in the order of the schema."""
    return {
        f"{section}.{name}": hint
        for section, cls in get_type_hints(Config).items()
        for name, hint in get_type_hints(cls).items()
    }


def leaf_fields() -> Iterator[tuple[str, Field[Any], Any]]:
    """Dotted path, dataclass field and default of every setting."""
    for section in fields(Config):
        assert is_dataclass(section.type)
        for item in fields(section.type):
            if item.default_factory is not MISSING:
                yield f"{section.name}.{item.name}", item, item.default_factory()
            else:
                yield f"{section.name}.{item.name}", item, item.default


def owner_of(path: str) -> str | None:
    """The setting that a dotted path lies in: `model.args.dim` lies in `model.args`."""
    setting = ".".join(path.split(".")[:2])
    hint = leaf_types().get(setting)
    if hint is None or (path != setting and get_origin(hint) is not dict):
        return None
    return setting


def check_keys(tree: Mapping[str, Any]) -> None:
    """Refuse what is not in the schema, with the nearest known key."""
    sections = {item.name for item in fields(Config)}
    for section, settings in tree.items():
        if section not in sections:
            # Name the setting, not the section, when a foreign section holds a familiar one.
            inner = next(iter(settings), None) if isinstance(settings, Mapping) else None
            raise explain_unknown(f"{section}.{inner}" if inner else section, list(leaf_types()))
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"`{section}` must hold settings, not {describe(settings)}",
                f"Write `{section}:` and the settings below it, indented.",
            )
        for name in settings:
            if f"{section}.{name}" not in leaf_types():
                raise explain_unknown(f"{section}.{name}", list(leaf_types()))


def build_config(tree: Mapping[str, Any]) -> Config:
    """The dataclass tree of a complete plain tree, types checked."""
    sections = {}
    for section, cls in get_type_hints(Config).items():
        given = tree.get(section, {})
        hints = get_type_hints(cls)
        sections[section] = cls(
            **{
                name: convert(value, hints[name], f"{section}.{name}")
                for name, value in given.items()
            }
        )
    return Config(**sections)


def convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as `hint` says, or a ConfigError that names the path."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        if value is None:
            return None
        return convert(value, next(arg for arg in args if arg is not NoneType), path)
    if origin is list and isinstance(value, list | tuple):
        return [convert(item, args[0], f"{path}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(key): convert(item, args[1], f"{path}.{key}") for key, item in value.items()}
    if origin is None:
        return _convert_scalar(value, hint, path)
    raise _wrong_type(value, hint, path)


def _convert_scalar(value: Any, hint: type, path: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number:
        if not math.isfinite(value):
            raise ConfigError(f"`{path}` must be a finite number, not {value}")
        return float(value)
    if hint is int and is_number and math.isfinite(value) and value == int(value):
        return int(value)
    if hint is str and path == "transport.encryption" and isinstance(value, bool):
        return "on" if value else "off"  # YAML reads a bare on/off as a boolean
    if hint in (str, bool) and isinstance(value, hint):
        return value
    if hint is str and isinstance(value, PurePath):
        return str(value)
    raise _wrong_type(value, hint, path)


def _wrong_type(value: Any, hint: Any, path: str) -> ConfigError:
    hint_text = f"Put it in quotes: `'{value}'`." if hint is str and value is not None else ""
    return ConfigError(f"`{path}` must be {type_name(hint)}, not {describe(value)}", hint_text)


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def type_name(hint: Any) -> str:
    """A type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return f"{type_name(args[0])} or null"
    if origin is list:
        return f"a list (each item {type_name(args[0])})"
    if origin is dict:
        return "a mapping" if args[1] is Any else f"a mapping (each value {type_name(args[1])})"
    return _NAMES[hint]


def describe(value: Any) -> str:
    """A value in an error message: short, with its type where that is not plain."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return str(value)
