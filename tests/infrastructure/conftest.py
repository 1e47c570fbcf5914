"""Fixtures that synthesize each configuration once in a test run, even with several test processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stacks.node import use_bundled_node
from tests.assembly import CONFIGURATIONS, Assembly, synthesize

use_bundled_node()


@pytest.fixture(scope="session")
def synthesized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Assembly]:
    """Returns a function that gives the assembly of a configuration by its name."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    @cache  # templates are read once
    def assembly(name: str) -> Assembly:
        folder = root / f"synthesized-{name}"
        with Path(f"{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "manifest.json").exists():
                unfinished = Path(f"{folder}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                synthesize(CONFIGURATIONS[name](), unfinished)
                unfinished.rename(folder)
        return Assembly(folder)

    return assembly


@pytest.fixture(params=list(CONFIGURATIONS))
def assembly(request: pytest.FixtureRequest, synthesized: Callable[[str], Assembly]) -> Assembly:
    """Returns the assembly of each configuration in turn."""
    return synthesized(request.param)
