"""The suites that run with and without inlined files, and the tests that need objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dormouse.reading import bundles
from dormouse.state.catalog import Catalog
from dormouse.writing import inlining as writing

INLINED_BYTES = 65_536
SUITES = {
    "test_changes",
    "test_changes_model",
    "test_changes_over_restores",
    "test_consumers",
    "test_deletes_model",
    "test_erase",
    "test_history_model",
    "test_keyed",
    "test_keyed_changes",
    "test_keyed_feed",
    "test_keyed_model",
    "test_query",
    "test_reshaping",
    "test_reshaping_model",
    "test_restores_model",
    "test_scaling",
    "test_time_travel",
}
"""The test modules whose tables have few rows, so that each of their ingests can be inlined."""


def also_inlined(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of the suites twice: with objects, and with inlined files."""
    is_suite = metafunc.module.__name__.rpartition(".")[2] in SUITES
    if is_suite and not metafunc.definition.get_closest_marker("objects"):
        metafunc.parametrize("inlining", [0, INLINED_BYTES], ids=["objects", "inlined"], indirect=True)


def _without_inlining(patch: pytest.MonkeyPatch) -> None:
    """Makes new tables of this process write objects, unless they are made with an `inline_bytes_max`."""
    create = Catalog.create

    def created(self: Catalog, name: str, schema: Any, properties: Any, *args: Any, **more: Any) -> Any:
        if "inline_bytes_max" not in properties.model_fields_set:
            properties = properties.model_copy(update={"inline_bytes_max": 0})
        return create(self, name, schema, properties, *args, **more)

    patch.setattr(Catalog, "create", created)


@pytest.fixture(autouse=True)
def inlining(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes new tables inline small files or not, by the parameter and the mark `objects`.

    In the suites, any two inlined files are joined.
    """
    bytes_max = getattr(request, "param", None)
    with pytest.MonkeyPatch.context() as patch:
        if bytes_max == 0 or request.node.get_closest_marker("objects"):
            _without_inlining(patch)
        if bytes_max:
            patch.setattr(bundles, "FILES_MIN", 2)
            patch.setattr(bundles, "TESTS_MAX", 2)
            patch.setattr(writing, "JOINED_MIN", 2)
        yield


@pytest.fixture(scope="module", autouse=True)
def objects_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes new tables write objects in fixtures of modules with the mark `objects`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("objects"):
            _without_inlining(patch)
        yield
