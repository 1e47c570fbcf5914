"""The suites that run with and without inlined files, and the tests that need objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from dormouse.reading import bundles
from dormouse.state.catalog import Catalog
from dormouse.writing import inlining as writing

TESTS = Path(__file__).parent
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
    "test_spark_source",
    "test_time_travel",
}
"""The test modules whose tests run with inlined files and with objects."""
HALVED = {"durability", "reading", "spark", "state"}
"""The rooms in which half of the other tests write objects: a hash of the test's name chooses."""


def also_inlined(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of the suites with objects and with inlined files; one of the two in the slow tier.

    A hash of the test's name chooses which.
    """
    is_suite = metafunc.module.__name__.rpartition(".")[2] in SUITES
    if is_suite and not metafunc.definition.get_closest_marker("objects"):
        slow = crc32(metafunc.function.__name__.encode()) % 2
        ways = [
            pytest.param(bytes_max, id=name, marks=[pytest.mark.slow] if number == slow else [])
            for number, (name, bytes_max) in enumerate({"objects": 0, "inlined": INLINED_BYTES}.items())
        ]
        metafunc.parametrize("inlining", ways, indirect=True)


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
    """Makes new tables inline small files or not, by the parameter, the mark `objects` or the test's name.

    In the suites, any two inlined files are joined.
    """
    bytes_max = getattr(request, "param", None)
    if bytes_max is None and request.path.relative_to(TESTS).parts[0] in HALVED:
        bytes_max = 0 if crc32(request.node.nodeid.encode()) % 2 else None
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
