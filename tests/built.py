"""The packages of the lambdas, which the tests of a run build once for each architecture."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from packages import Architecture

ROOT = Path(__file__).parents[1]


def copy_sources(source: Path, target: Path) -> None:
    for folder in ("dormouse", "lambdas"):
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "requirements.txt", target)


@pytest.fixture(scope="session")
def lambda_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the sources, which no editor changes while the tests run."""
    root = tmp_path_factory.mktemp("root")
    copy_sources(ROOT, root)
    return root


@pytest.fixture(scope="session")
def built_lambdas(
    lambda_sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Architecture], Path]]:
    """Yields a function that returns the folder with the packages for an architecture, in `lambdas`."""
    from lambdas.build import build

    parent = tmp_path_factory.mktemp("built")

    @cache
    def built(architecture: Architecture) -> Path:
        assert build(lambda_sources, parent / architecture, architecture)
        return parent / architecture

    yield built
    shutil.rmtree(parent)
