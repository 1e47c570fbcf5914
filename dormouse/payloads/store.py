"""The payloads of an instance, as users hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from dormouse.errors import DormouseError, InvalidPayload, PayloadNotFound
from dormouse.objects import ObjectStore
from dormouse.payloads import rows
from dormouse.payloads.content import decode, encode
from dormouse.payloads.keys import PayloadKey, checked
from dormouse.postgres.connection import Supplier


class PayloadStore:
    """JSON documents by tenant, id, time and kind. Made by `instance.payloads`; threads may share it.

    A key is (tenant, id, inserted_at, kind): tenant, id and kind are text of at most 512 bytes each, and
    `inserted_at` an aware datetime, whose day in UTC is what the payload is kept and expires with.
    """

    def __init__(
        self, supplier: Supplier, objects: ObjectStore, check_writable: Callable[[], object] = lambda: None
    ) -> None:
        self._supplier = supplier
        self._objects = objects
        self._check_writable = check_writable

    def put(self, tenant: str, id: str, inserted_at: datetime, kind: str, content: Any) -> None:
        """Keeps a payload, in place of the one of the same key. `content` is any JSON value, None too.

        Raises `InvalidPayload`, and `PayloadExpired` for a day that was dropped.
        """
        self.put_many([(tenant, id, inserted_at, kind, content)])

    def put_many(self, payloads: Iterable[tuple[str, str, datetime, str, Any]]) -> None:
        """Keeps (tenant, id, inserted_at, kind, content), all or none; of one key, the last.

        Raises as `put`.
        """
        contents: dict[PayloadKey, str] = {}
        for given in payloads:
            if not isinstance(given, Sequence) or len(given) != 5:
                raise InvalidPayload(f"a payload is (tenant, id, inserted_at, kind, content), not {given!r}")
            key = checked(given[:4])
            contents[key] = encode(key, given[4])
        self._check_writable()
        if contents:
            rows.put(self._supplier, contents)

    def get(self, tenant: str, id: str, inserted_at: datetime, kind: str) -> Any:
        """The content of a payload.

        Raises `InvalidPayload` for a key that cannot be, `PayloadNotFound`, `PayloadExpired` when its day was
        dropped, `PayloadCorrupt` when what is kept of it is not what was written, and `PayloadUnavailable`
        when the object store does not give it now.
        """
        [found] = self.get_many([(tenant, id, inserted_at, kind)]).values()
        if isinstance(found, DormouseError):
            raise found
        return found

    def get_many(self, keys: Iterable[tuple[str, str, datetime, str]]) -> dict[PayloadKey, Any]:
        """The content of each key, or the error that `get` would raise. Raises `InvalidPayload`."""
        wanted = dict.fromkeys(map(checked, keys))
        found: dict[PayloadKey, Any] = dict(wanted)
        for key, place in rows.places(self._supplier, wanted):
            if place is None:
                found[key] = rows.expired(key)
            elif place.content is not None:
                found[key] = decode(place.content)
            else:
                found[key] = PayloadNotFound(f"there is no payload {key}")
        return found

    def delete(self, tenant: str, id: str, inserted_at: datetime, kind: str) -> None:
        """Deletes a payload, if it is there. Raises `InvalidPayload`."""
        self.delete_many([(tenant, id, inserted_at, kind)])

    def delete_many(self, keys: Iterable[tuple[str, str, datetime, str]]) -> None:
        """Deletes those that are there, all or none. Raises `InvalidPayload`."""
        wanted = set(map(checked, keys))
        self._check_writable()
        if wanted:
            rows.delete(self._supplier, wanted)
