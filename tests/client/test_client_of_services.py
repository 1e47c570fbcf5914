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
    """Describes a table, and plans; `of_now` has and demands another name of the columns each time."""

    def __init__(self, of_now: bool) -> None:
        self.of_now = of_now
        self.described = 0
        self.asked: list[dict[str, Any]] = []

    def json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if method == "GET":
            self.described += 1
            named = {"schema_id": str(self.described)} if self.of_now else {}
            return {"schema": _SCHEMA, "properties": {}, **named}
        self.asked.append(body)
        if self.of_now:
            raise InvalidInput("the columns of table 't' were changed: look it up again")
        return dict.fromkeys(PlanSummary.__dataclass_fields__, 0)


def _table(service: Any) -> RemoteTable:
    return Client(service).table("t")


def test_a_service_of_before_is_not_told_what_it_does_not_know() -> None:
    service = _Service(of_now=False)
    _table(service).explain({"k": 1})
    assert service.asked == [{"where": {"k": [1]}}]


def test_columns_that_are_others_each_time_are_not_asked_for_ever() -> None:
    service = _Service(of_now=True)
    with pytest.raises(InvalidInput, match="were changed"):
        _table(service).explain({"k": 1})
    assert len(service.asked) == SCHEMAS_CHASED_MAX + 1


ALONE = BLOCKED + "import dormouse.client.rows"


def test_the_client_needs_no_more_than_its_extra_brings() -> None:
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
def test_a_secret_that_cannot_be_one_is_refused_without_showing_it(url: str, token: str | None) -> None:
    with pytest.raises(InvalidInput, match=r"the token must be of|has no user and no password") as found:
        connect(url, token=token)
    assert "secr" not in str(found.value)


DEEP = reduce(lambda inner, _: [inner], range(100_000), [0])


@pytest.mark.parametrize(
    "value", [date(2026, 3, 5), math.nan, "\ud800", DEEP], ids=["date", "nan", "surrogate", "deep"]
)
def test_what_is_no_json_is_refused_before_it_is_sent(value: Any) -> None:
    with connect("http://127.0.0.1:1") as client, pytest.raises(InvalidPayload, match="is not JSON: "):
        client.jobs.start("query", {"where": {"day": value}})
