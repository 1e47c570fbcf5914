"""A fixture for the modules that read the syntax trees of all files."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def trees_stay() -> Iterator[None]:
    """Disables the garbage collector, which would traverse all syntax trees repeatedly and free nothing."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
