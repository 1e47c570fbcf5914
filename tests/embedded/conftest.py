"""A fixture with which the tests of embedded servers set up each data directory as users do."""

from __future__ import annotations

import pytest

from dormouse.embedded.server import Server
from tests.prepared import initialize


@pytest.fixture(autouse=True)
def own_data_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "_initialize", initialize)
