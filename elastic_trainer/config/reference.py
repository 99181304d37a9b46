"""Writes `docs/configuration.md` and `configs/default.yaml` from the dataclasses."""

from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from elastic_trainer.config.aliases import ALIASES
from elastic_trainer.config.load import recipe_names
from elastic_trainer.config.schema import Config
from elastic_trainer.config.tree import leaf_fields, leaf_types, type_name
from elastic_trainer.config.validate import CHOICES, LIMITS

_HEAD = """\
# Configuration

<!-- Written by `python -m elastic_trainer.config docs` from elastic_trainer/config/schema.py. -->

A configuration is a tree of sections with settings. It is put together from, later ones winning:

1. `configs/default.yaml`, the defaults below;
2. `CONFIG` of `elastic-trainer train CONFIG`: a YAML file that holds only what differs, a run
   folder (its saved configuration), or the bare name of a shipped recipe ({recipes});
3. `key=value` overrides, e.g. `train.max_steps=200 model.args.dim=256 pipeline.cuts=[3,6]`. Values
   are YAML.

Mappings such as `model.args` are merged setting by setting. Choosing another model starts its
arguments afresh, and an override `model.args={{…}}` replaces all of them. Unknown settings are
refused. With neither `train.max_steps` nor `train.num_epochs`, training lasts one epoch. Each run
keeps its resolved configuration as `config.yaml` in the run folder. In Python,
`load_config(CONFIG, ["key=value"])` does the same.
"""

_ALIASES_HEAD = """\
## Names from other trainers

Hugging Face, Lightning, torchtitan, Megatron and Ray names are not accepted, but recognised: the
error says which setting is meant.

| elsewhere | here | |
|---|---|---|
"""


def configuration_page() -> str:
    """The text of docs/configuration.md."""
    parts = [_HEAD.format(recipes=", ".join(f"`{name}`" for name in recipe_names()))]
    for section in fields(Config):
        assert isinstance(section.type, type) and section.type.__doc__
        parts.append(f"\n## `{section.name}`\n\n{section.type.__doc__}\n")
        parts.append("| setting | type | default | meaning |\n|---|---|---|---|")
        parts += [
            _row(path, item.metadata["doc"], default)
            for path, item, default in leaf_fields()
            if path.startswith(f"{section.name}.")
        ]
    aliases = [
        f"| `{name}` | {f'`{ours}`' if ours else '–'} | {note} |"
        for name, (ours, note) in sorted(ALIASES.items())
    ]
    return "\n".join([*parts, "", _ALIASES_HEAD + "\n".join(aliases)]) + "\n"


def _row(path: str, doc: str, default: Any) -> str:
    kind = type_name(leaf_types()[path])
    if path in LIMITS:
        low, high = LIMITS[path]
        kind += f", at least {low}" if high is None else f", {low} to {high}"
    if path in CHOICES:
        kind = ", ".join(f"`{choice}`" for choice in CHOICES[path])
    return f"| `{path}` | {kind} | `{_yaml(default)}` | {doc} |"


def default_yaml() -> str:
    """The text of configs/default.yaml."""
    lines = [
        "# Every setting with its default. Written by `python -m elastic_trainer.config defaults`",
        "# from elastic_trainer/config/schema.py; docs/configuration.md explains each setting.",
    ]
    section = None
    for path, _, default in leaf_fields():
        head, name = path.split(".")
        if head != section:
            section = head
            lines += ["", f"{head}:"]
        lines.append(f"  {name}: {_yaml(default)}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """A default value as YAML on one line."""
    if value in ([], {}):
        return str(value)
    return OmegaConf.to_yaml({"v": value}).removeprefix("v: ").strip()
