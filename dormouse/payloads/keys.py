"""What a payload is known by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from dormouse.errors import InvalidInput, InvalidPayload
from dormouse.model.text import check_text

KEY_BYTES_MAX = 512
"""Of each of tenant, id and kind: an index entry of PostgreSQL holds all three."""

OWN_KINDS = "dormouse."
"""What kinds of Dormouse's own payloads begin with, which are the documents of jobs."""

_PLACE = ("kind", "tenant", "id", "at")


class PayloadKey(NamedTuple):
    """A payload's key: of which tenant it is, its id, when it was inserted (aware), and its kind."""

    tenant: str
    id: str
    inserted_at: datetime
    kind: str

    @property
    def day(self) -> date:
        """The day that it is kept in, in UTC."""
        return self.inserted_at.astimezone(UTC).date()

    @property
    def place(self) -> tuple[str, str, str, datetime]:
        """What payloads are sorted by: as PostgreSQL does, by bytes."""
        return self.kind, self.tenant, self.id, self.inserted_at

    def __str__(self) -> str:
        return f"{self.kind} {self.id!r} of tenant {self.tenant!r} at {self.inserted_at.isoformat()}"


def checked(key: Sequence[Any]) -> PayloadKey:
    """The key, in UTC; `InvalidPayload`, which names what is wrong with it."""
    try:
        made = PayloadKey(*key)
    except TypeError:
        raise InvalidPayload(f"a payload's key is (tenant, id, inserted_at, kind), not {key!r}") from None
    try:
        for what, value in (("tenant", made.tenant), ("id", made.id), ("kind", made.kind)):
            check_text(f"the {what} of a payload", value, KEY_BYTES_MAX)
    except InvalidInput as error:
        raise InvalidPayload(str(error)) from None
    at = made.inserted_at
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise InvalidPayload(
            f"inserted_at must be an aware datetime, not {at!r}: give it a zone, as datetime.now(UTC) has one"
        )
    try:
        return made._replace(inserted_at=at.astimezone(UTC))
    except OverflowError:
        raise InvalidPayload(f"inserted_at {at.isoformat()} is in no year from 1 to 9999 in UTC") from None


def check_application_kind(kind: str) -> None:
    """Raises `InvalidPayload` for a kind that belongs to payloads of Dormouse itself."""
    if kind.startswith(OWN_KINDS):
        raise InvalidPayload(f"kind {kind!r}: kinds that begin with {OWN_KINDS!r} are for jobs of Dormouse")


def place_values(name: str, key: PayloadKey | None) -> dict[str, Any]:
    """A key's place as the values of a statement, `name`_kind and so on; all None without a key."""
    place = (None,) * len(_PLACE) if key is None else key.place
    return {f"{name}_{part}": value for part, value in zip(_PLACE, place, strict=True)}


def columns(keys: Iterable[PayloadKey]) -> dict[str, list[Any]]:
    """Keys as the arrays of a statement."""
    found = list(keys)
    return {
        "kinds": [key.kind for key in found],
        "tenants": [key.tenant for key in found],
        "ids": [key.id for key in found],
        "times": [key.inserted_at for key in found],
    }
