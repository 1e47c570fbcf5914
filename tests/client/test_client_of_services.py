"""Tests of the requests that a client sends to services of other versions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from datetime import date
from functools import reduce
from typing import Any

import pytest

from dormouse.client import connect
from dormouse.client.client import Client, RemoteTable
from dormouse.errors import EXTRAS, InvalidInput, InvalidPayload
from dormouse.reading.planner import PlanSummary
from dormouse.reading.where import SCHEMAS_CHASED_MAX
from tests.standard import OF_K
from tests.without import BLOCKED

_SCHEMA = OF_K.to_json()


class _Service:
    """A service with one table. If `is_current`, it gives the columns a new id at each request.

    Such a service refuses every plan, because the id of the columns in the request is always old.
    """

    def __init__(self, is_current: bool) -> None:
        self.is_current = is_current
        self.described = 0
        self.requests: list[dict[str, Any]] = []

    def json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if method == "GET":
            self.described += 1
            named = {"schema_id": str(self.described)} if self.is_current else {}
            return {"schema": _SCHEMA, "properties": {}, **named}
        self.requests.append(body)
        if self.is_current:
            raise InvalidInput("the columns of table 't' were changed: look it up again")
        return dict.fromkeys(PlanSummary.__dataclass_fields__, 0)


def _table(service: Any) -> RemoteTable:
    return Client(service).table("t")


def test_an_older_service_gets_no_unknown_fields() -> None:
    service = _Service(is_current=False)
    _table(service).explain({"k": 1})
    assert service.requests == [{"where": {"k": [1]}}]


def test_retries_for_changing_columns_are_limited() -> None:
    service = _Service(is_current=True)
    with pytest.raises(InvalidInput, match="were changed"):
        _table(service).explain({"k": 1})
    assert len(service.requests) == SCHEMAS_CHASED_MAX + 1


ALONE = BLOCKED + "import dormouse.client.rows"


def test_the_client_needs_only_the_libraries_of_its_extra() -> None:
    left_out = json.dumps([*EXTRAS.keys() - {"httpx", "pyarrow"}])
    command = [sys.executable, "-c", ALONE, left_out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://127.0.0.1:1", "secret\n"),
        ("http://127.0.0.1:1", "secret\r\nX: y"),
        ("http://127.0.0.1:1", "secr\u00e9t"),
        ("http://somebody:secret@127.0.0.1:1", None),
        ("http://secret@127.0.0.1:1", "right"),
        ("http://somebody:secret@127.0.0.1:x", None),
        ("http://somebody:secret@127.0.0.1:1/?a=1", None),
    ],
)
def test_an_invalid_secret_is_refused_without_showing_it(url: str, token: str | None) -> None:
    with pytest.raises(InvalidInput, match=r"the token must be of|has no user and no password") as found:
        connect(url, token=token)
    assert "secr" not in str(found.value)


DEEP = reduce(lambda inner, _: [inner], range(100_000), [0])


@pytest.mark.parametrize(
    "value", [date(2026, 3, 5), math.nan, "\ud800", DEEP], ids=["date", "nan", "surrogate", "deep"]
)
def test_values_that_json_cannot_hold_are_refused_before_sending(value: Any) -> None:
    with connect("http://127.0.0.1:1") as client, pytest.raises(InvalidPayload, match="is not JSON: "):
        client.jobs.start("query", {"where": {"day": value}})
