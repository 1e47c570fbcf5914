"""The payloads of an instance through its query service, with the methods of `PayloadStore` that HTTP has."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from dormouse.client.http import Http, problem_error
from dormouse.errors import DormouseError, InvalidPayload
from dormouse.model.text import path_segment
from dormouse.payloads.keys import PayloadKey, checked, encode_given

MANY_MAX = 1_000
"""The most payloads that one request can name."""


class RemotePayloads:
    """The payloads of an instance. The token must have the right to use them. See `Client.payloads`."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def put(self, tenant: str, id: str, inserted_at: datetime, kind: str, content: Any) -> None:
        """Stores a payload, or replaces the payload of the same key. Raises the errors of
        `PayloadStore.put`.
        """
        self.put_many([(tenant, id, inserted_at, kind, content)])

    def put_many(self, payloads: Iterable[tuple[str, str, datetime, str, Any]]) -> None:
        """Stores at most 1,000 payloads, given as (tenant, id, inserted_at, kind, content): all or none.

        If several have the same key, the last is kept. Raises `InvalidPayload` and `PayloadExpired`.
        """
        given = list(payloads)
        if len(given) > MANY_MAX:
            raise InvalidPayload(
                f"{len(given):,} payloads are sent at once, and {MANY_MAX:,} are the most: divide them"
            )
        contents = {}
        for one in given:
            key, _ = encode_given(one)
            contents[key] = one[4]
        if contents:
            listed = [_named(key) | {"content": content} for key, content in contents.items()]
            self._http.json("POST", "/v1/payloads", {"payloads": listed})

    def get(self, tenant: str, id: str, inserted_at: datetime, kind: str) -> Any:
        """Returns the content of a payload. Raises the errors of `PayloadStore.get`."""
        return self._http.json("GET", _path(checked((tenant, id, inserted_at, kind))))

    def get_many(self, keys: Iterable[tuple[str, str, datetime, str]]) -> dict[PayloadKey, Any]:
        """Returns for each key its content, or the error that `get` would raise. Raises `InvalidPayload`."""
        wanted = list(dict.fromkeys(map(checked, keys)))
        found: dict[PayloadKey, Any] = {}
        for start in range(0, len(wanted), MANY_MAX):
            some = wanted[start : start + MANY_MAX]
            listed = self._http.json("POST", "/v1/payloads/get", {"keys": list(map(_named, some))})[
                "payloads"
            ]
            found |= {key: self._content(one) for key, one in zip(some, listed, strict=True)}
        return found

    def delete(self, tenant: str, id: str, inserted_at: datetime, kind: str) -> None:
        """Deletes a payload, if it exists. Raises `InvalidPayload`."""
        self.delete_many([(tenant, id, inserted_at, kind)])

    def delete_many(self, keys: Iterable[tuple[str, str, datetime, str]]) -> None:
        """Deletes the payloads that exist, one after the other. Raises `InvalidPayload`."""
        for path in [_path(checked(key)) for key in keys]:
            self._http.open("DELETE", path, accept="*/*").close()

    def _content(self, document: dict[str, Any]) -> Any | DormouseError:
        problem = document.get("problem")
        return document["content"] if problem is None else problem_error(problem, self._http.url)


def _named(key: PayloadKey) -> dict[str, str]:
    return {**key._asdict(), "inserted_at": key.inserted_at.isoformat()}


def _path(key: PayloadKey) -> str:
    return "/".join(("/v1/payloads", *map(path_segment, _named(key).values())))
