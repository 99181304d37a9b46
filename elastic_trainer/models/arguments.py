"""Checks of a model's arguments, with messages that name the setting."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_trainer.errors import ModelError

LONGEST_LIST = 12


def nearest(name: str, known: Sequence[str]) -> str:
    """`nearest: …`, or what is known when nothing is near and the list is short."""
    if close := difflib.get_close_matches(name, known, n=1):
        return f"nearest: {close[0]}"
    if len(known) > LONGEST_LIST:
        return f"nothing like it among {len(known)} known"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def check_arguments(what: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Refuse arguments that `function` does not take, and say which ones it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins may have none: the call itself will tell
        return
    parameters = signature.parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    unknown = [name for name in args if name not in names and not takes_any]
    if unknown:
        raise ModelError(
            f"{what} takes no argument {unknown[0]!r} ({nearest(unknown[0], names)})",
            "Correct model.args",
        )
    missing = [p.name for p in named if p.default is p.empty and p.name not in args]
    if missing:
        raise ModelError(
            f"{what} needs the argument {missing[0]!r}", f"Set model.args.{missing[0]}"
        )


def require_positive(model: str, **values: int | float) -> None:
    """Each value is a number above zero."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{model}: {name} is {value!r}, a whole number above 0 is needed",
                f"Set model.args.{name}",
            )


def require_fraction(model: str, **values: float) -> None:
    """Each value lies in [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ModelError(
                f"{model}: {name} is {value!r}, a number from 0 up to 1 is needed",
                f"Set model.args.{name}",
            )


def require_choice(model: str, name: str, value: str, known: Sequence[str]) -> None:
    """The value is one of those known."""
    if value not in known:
        raise ModelError(
            f"{model}: {name} is {value!r} ({nearest(str(value), known)})", f"Set model.args.{name}"
        )


def require_heads(model: str, dim: int, num_heads: int) -> None:
    """`dim` divides into the heads."""
    if dim % num_heads:
        raise ModelError(
            f"{model}: dim {dim} does not divide into {num_heads} heads",
            f"Set model.args.dim to {dim - dim % num_heads + num_heads}, or change num_heads",
        )
