"""Fixtures that every test shares."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Compute threads are part of the numerics: tests fix them as the trainer does."""
    import torch

    torch.set_num_threads(1)
    yield
