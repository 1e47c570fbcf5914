"""What a payload is: its key, and its content, a JSON value that `get` gives as `put` took it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from dormouse.errors import InvalidInput, InvalidPayload
from dormouse.model.json_values import json_text
from dormouse.model.text import check_text

KEY_BYTES_MAX = 512
"""Of each of tenant, id and kind: an index entry of PostgreSQL holds all three."""

OWN_KINDS = "dormouse."
"""What kinds of Dormouse's own payloads begin with, which are the documents of jobs."""

_PLACE = ("kind", "tenant", "id", "at")
Places = Mapping[str, tuple[int, int, str]]
"""Of dictionaries by kind: start, length, and the first half of the SHA-256."""


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


CONTENT_BYTES_MAX = 64 * 2**20
"""Of a payload's JSON in UTF-8."""

NESTING_MAX = 500
"""Of arrays and objects: half of what Python reads and writes."""

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')
_EXPONENTS = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d(?:\.\d+)?e\+\d+)')
_SIMPLE = (str, int, float, bool, type(None))


def encode_given(given: object) -> tuple[PayloadKey, str]:
    """Returns the key and the JSON of (tenant, id, inserted_at, kind, content). Raises `InvalidPayload`."""
    if not isinstance(given, Sequence) or len(given) != 5:
        raise InvalidPayload(f"a payload is (tenant, id, inserted_at, kind, content), not {given!r}")
    key = checked(given[:4])
    check_application_kind(key.kind)
    return key, encode(key, given[4])


def encode(key: PayloadKey, content: Any) -> str:
    """The JSON of a payload; `InvalidPayload` when it is no JSON value, or none that can be kept."""
    try:
        text = json_text(content)
        size = len(text) if text.isascii() else len(text.encode())
        if not _is_same(json.loads(text), content):
            raise InvalidPayload(f"payload {key} is not JSON: {_fault(content)}")
    except InvalidPayload:
        raise
    except UnicodeEncodeError:
        raise InvalidPayload(f"payload {key} has a lone surrogate, which no UTF-8 text can have") from None
    except RecursionError:
        raise _too_deep(key) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidPayload(f"payload {key} is not JSON: {_reason(content, error)}") from None
    if size > CONTENT_BYTES_MAX:
        raise InvalidPayload(
            f"payload {key} has {size:,} bytes of JSON, and {CONTENT_BYTES_MAX:,} are the most: divide it"
        )
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidPayload(f"payload {key} has the character NUL (\\u0000), which PostgreSQL cannot hold")
    if text.count("[") + text.count("{") > NESTING_MAX and _depth(text) > NESTING_MAX:
        raise _too_deep(key)
    return _EXPONENTS.sub(_written_out, text) if "e+" in text else text


def decode(text: str | bytes) -> Any:
    """The value of JSON that PostgreSQL wrote."""
    return json.loads(text)


def _is_same(read: Any, given: Any) -> bool:
    # what Python writes in another form is found here, and told precisely
    return bool(read == given) or _fault(given) is None


def _fault(value: Any, where: str = "it") -> str | None:
    """Why a value is not one of JSON; None when it is. Tuples are arrays."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                return f"{where} has the name {name!r}, and names are text"
            if fault := _fault(inner, f"{where}[{name!r}]"):
                return fault
        return None
    if isinstance(value, (list, tuple)):
        faults = (_fault(inner, f"{where}[{n}]") for n, inner in enumerate(value))
        return next((fault for fault in faults if fault), None)
    if isinstance(value, float) and value - value != 0:
        return f"{where} is {value!r}, which is no number of JSON"
    return None if isinstance(value, _SIMPLE) else f"{where} is of type {type(value).__name__}"


def _reason(content: Any, error: Exception) -> str:
    try:
        return _fault(content) or str(error)
    except RecursionError:  # it holds itself
        return str(error)


def _too_deep(key: PayloadKey) -> InvalidPayload:
    return InvalidPayload(f"payload {key} nests more than {NESTING_MAX} arrays and objects in each other")


def _depth(text: str) -> int:
    deepest = depth = 0
    for found in _BRACKETS.finditer(text):
        depth += (found[1] is not None) - (found[2] is not None)
        deepest = max(deepest, depth)
    return deepest


def _written_out(found: re.Match[str]) -> str:
    # PostgreSQL writes numbers without exponents, and one without a point would come back as an integer
    return found[0] if found[1] is None else f"{Decimal(found[1]):f}.0"
