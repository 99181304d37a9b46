"""Which names are held out: a function of the name and the seed alone."""

from collections.abc import Iterable
from hashlib import sha256

from elastic_trainer.errors import DataError


def held_out_names(names: Iterable[str], *, eval_fraction: float, seed: int) -> set[str]:
    """The names of the held-out side.

    A new name moves no other one; only where one side would be empty does the name nearest to the
    limit change over.
    """
    if not 0 < eval_fraction < 1:
        raise DataError(f"eval_fraction is {eval_fraction}", "Choose one between 0 and 1")
    scored = sorted((_score(seed, name), name) for name in names)
    if len(scored) < 2:
        raise DataError(
            f"the source holds {len(scored)} document(s) or picture(s); a dataset needs 2, one "
            "held out",
            "Check the source",
        )
    num_held_out = sum(score < eval_fraction for score, _ in scored)
    num_held_out = min(max(num_held_out, 1), len(scored) - 1)
    return {name for _, name in scored[:num_held_out]}


def _score(seed: int, name: str) -> float:
    digest = sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
