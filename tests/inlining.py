"""The suites that run with inlined files as well, by one more parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dormouse.reading import bundles
from dormouse.writing import inlining as writing
from tests.support.model import TableProperties

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
    """Runs the tests of the suites twice: as they are, and with inlined files by default."""
    if metafunc.module.__name__.rpartition(".")[2] in SUITES and "inlining" not in metafunc.fixturenames:
        metafunc.fixturenames.append("inlining")
        metafunc.parametrize("inlining", [0, INLINED_BYTES], ids=["objects", "inlined"], indirect=True)


@pytest.fixture
def inlining(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes the default of `inline_bytes_max` the parameter, and lets any two inlined files be joined."""
    field = TableProperties.model_fields["inline_bytes_max"]
    before, field.default = field.default, request.param
    TableProperties.model_rebuild(force=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "FILES_MIN", 2)
        patch.setattr(bundles, "TESTS_MAX", 2)
        patch.setattr(writing, "JOINED_MIN", 2)
        yield
    field.default = before
    TableProperties.model_rebuild(force=True)
