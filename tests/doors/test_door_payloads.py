"""Payloads, which Python, the client, HTTP and commands store, read and delete with the same results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from dormouse.errors import DormouseError
from dormouse.payloads.keys import PayloadKey
from tests.every_door import CommandLine, Door, Failed, House, Http, Python, Remote, problem

Key = tuple[str, str, datetime, str]
NOON = datetime(2026, 3, 5, 12, tzinfo=UTC)
GONE = datetime(2001, 1, 1, tzinfo=UTC)
"""A time on a day whose payloads were dropped."""

_numbers = itertools.count(1)


class _ByStore(Door):
    """The methods that a door to `PayloadStore` and a door to the client share."""

    payloads: Any

    def put(self, key: Key, content: Any) -> None:
        self.payloads.put(*key, content)

    def get(self, key: Key) -> Any:
        return self.payloads.get(*key)

    def delete(self, key: Key) -> None:
        self.payloads.delete(*key)

    def put_many(self, payloads: list[tuple[Key, Any]]) -> None:
        self.payloads.put_many([(*key, content) for key, content in payloads])

    def get_many(self, keys: list[Key]) -> list[Any]:
        found = self.payloads.get_many(keys)
        return [_or_failed(found[PayloadKey(*key)]) for key in keys]


class PayloadsInPython(_ByStore, Python):
    """The door `Instance.payloads`."""

    @property
    def payloads(self) -> Any:
        return self.house.instance.payloads


class PayloadsByClient(_ByStore, Remote):
    """The door `Client.payloads`."""

    @property
    def payloads(self) -> Any:
        return self.house.client.payloads


class PayloadsByHttp(Http):
    """The door `/v1/payloads`."""

    def put(self, key: Key, content: Any) -> Any:
        return self._none(
            "PUT", key, content=json.dumps(content), headers={"Content-Type": "application/json"}
        )

    def get(self, key: Key) -> Any:
        return self._get(_path(key))

    def delete(self, key: Key) -> Any:
        return self._none("DELETE", key)

    def put_many(self, payloads: list[tuple[Key, Any]]) -> Any:
        listed = [_named(key) | {"content": content} for key, content in payloads]
        found = self._post("/v1/payloads", {"payloads": listed})
        return found if isinstance(found, Failed) else None

    def get_many(self, keys: list[Key]) -> Any:
        found = self._post("/v1/payloads/get", {"keys": [_named(key) for key in keys]})
        if isinstance(found, Failed):
            return found
        return [_of_document(one) for one in found["payloads"]]

    def _none(self, method: str, key: Key, **how: Any) -> Failed | None:
        answer = httpx.request(method, self.house.url + _path(key), timeout=60, **how)
        return None if answer.status_code == 204 else problem(answer)


class PayloadsByCommand(CommandLine):
    """The door `dormouse payloads …`."""

    def put(self, key: Key, content: Any) -> Any:
        path = self.house.put("payload.json", json.dumps(content).encode())
        found = self._json("payloads", "put", *_texts(key), "--file", path)
        return found if isinstance(found, Failed) else None

    def get(self, key: Key) -> Any:
        return self._json("payloads", "get", *_texts(key))


@pytest.fixture
def payload_doors(house: House, cli: Callable[..., tuple[int, str, str]], environment: None) -> list[Any]:
    """Returns the doors to payloads. Python is first; the command line is last and does one payload at a
    time.
    """
    by_command = PayloadsByCommand(house, cli)
    return [PayloadsInPython(house), PayloadsByClient(house), PayloadsByHttp(house), by_command]


@pytest.fixture(scope="module")
def dropped_day(house: House) -> None:
    """Stores a payload of a past day and drops that day."""
    house.instance.payloads.put("acme", "old", GONE, "request", {"old": True})
    dropped, _ = house.instance.payloads.expire(date(2001, 1, 2))
    assert GONE.date() in dropped


def new_key(kind: str = "request", at: datetime = NOON) -> Key:
    """Returns a key that no payload has."""
    return "ac/me ü", f"id {next(_numbers)}", at, kind


CONTENTS: list[Any] = [
    None,
    True,
    0,
    -1.5,
    12345678901234567890123456789,
    "",
    'ü "quoted" \\ line\nbreak',
    [],
    {},
    {"a": [1, {"b": None}], "ü": "x" * 5_000, "": {"deep": [[[]]]}},
]

KEYS: list[tuple[Key, str]] = [
    (("acme", "1", NOON.replace(tzinfo=None), "request"), "InvalidPayload"),
    (("acme", "1", NOON, "dormouse.job"), "InvalidPayload"),
    (("a" * 600, "1", NOON, "request"), "InvalidPayload"),
    (("acme", "old", GONE, "request"), "PayloadExpired"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("content", CONTENTS, ids=repr)
def test_every_door_reads_what_any_door_stored(payload_doors: list[Any], content: Any) -> None:
    for door in payload_doors:
        key = new_key()
        assert door.ask("put", key=key, content=content) is None, type(door).__name__
        for reader in payload_doors:
            assert reader.ask("get", key=key) == content, type(reader).__name__


@pytest.mark.slow
def test_a_payload_replaces_the_one_with_its_key(payload_doors: list[Any]) -> None:
    key = new_key()
    for number, door in enumerate(payload_doors):
        assert door.ask("put", key=key, content=number) is None
        assert [reader.ask("get", key=key) for reader in payload_doors] == [number] * len(payload_doors)


def test_a_time_is_the_same_key_in_every_zone(payload_doors: list[Any]) -> None:
    key = new_key(at=NOON.astimezone(timezone(timedelta(hours=-5))))
    payload_doors[0].ask("put", key=key, content=1)
    for door in payload_doors:
        assert door.ask("get", key=(*key[:2], NOON, key[3])) == 1, type(door).__name__


def test_no_door_finds_a_deleted_payload(payload_doors: list[Any]) -> None:
    for door in payload_doors[:3]:
        key = new_key()
        payload_doors[0].ask("put", key=key, content=1)
        assert door.ask("delete", key=key) is None
        assert door.ask("delete", key=key) is None
        expected = payload_doors[0].ask("get", key=key)
        assert isinstance(expected, Failed) and expected.error == "PayloadNotFound"
        for reader in payload_doors:
            assert reader.ask("get", key=key) == expected, type(reader).__name__


def test_many_payloads_are_stored_and_read_alike_by_every_door(
    payload_doors: list[Any], dropped_day: None
) -> None:
    many = payload_doors[:3]
    for door in many:
        first, second, missing = (new_key() for _ in range(3))
        assert door.ask("put_many", payloads=[(first, 1), (second, {"n": 2}), (first, 3)]) is None
        keys = [first, second, missing, ("acme", "old", GONE, "request")]
        expected = many[0].ask("get_many", keys=keys)
        assert expected[:2] == [3, {"n": 2}]
        assert [one.error for one in expected[2:]] == ["PayloadNotFound", "PayloadExpired"]
        for reader in many:
            assert reader.ask("get_many", keys=keys) == expected, type(reader).__name__


def test_of_many_payloads_all_or_none_are_stored(payload_doors: list[Any], dropped_day: None) -> None:
    for door in payload_doors[:3]:
        key = new_key()
        failed = door.ask("put_many", payloads=[(key, 1), (("acme", "x", GONE, "request"), 2)])
        assert isinstance(failed, Failed) and failed.error == "PayloadExpired", type(door).__name__
        assert payload_doors[0].ask("get", key=key).error == "PayloadNotFound"


@pytest.mark.parametrize(("key", "error"), KEYS)
def test_every_door_refuses_the_same_payload(
    payload_doors: list[Any], dropped_day: None, key: Key, error: str
) -> None:
    expected = payload_doors[0].ask("put", key=key, content=1)
    assert isinstance(expected, Failed) and expected.error == error, expected
    for door in payload_doors:
        assert door.ask("put", key=key, content=1) == expected, type(door).__name__


def _or_failed(answer: Any) -> Any:
    return Failed(str(answer), type(answer).__name__) if isinstance(answer, DormouseError) else answer


def _of_document(document: dict[str, Any]) -> Any:
    if "problem" not in document:
        return document["content"]
    words = document["problem"]["type"].removeprefix("urn:dormouse:").split("-")
    return Failed(document["problem"]["detail"], "".join(word.capitalize() for word in words))


def _texts(key: Key) -> list[str]:
    tenant, id_, at, kind = key
    return [tenant, id_, at.isoformat(), kind]


def _named(key: Key) -> dict[str, str]:
    return dict(zip(("tenant", "id", "inserted_at", "kind"), _texts(key), strict=True))


def _path(key: Key) -> str:
    return "/v1/payloads/" + "/".join(quote(text, safe="") for text in _texts(key))
