"""The keys of payloads, and their contents: JSON values that `get` returns exactly as `put` received them."""

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
"""The most bytes of a tenant, an id or a kind, because one entry of PostgreSQL's index holds all three."""

OWN_KINDS = "dormouse."
"""The prefix of the kinds of Dormouse's own payloads, which are documents of jobs."""

_PLACE = ("kind", "tenant", "id", "at")
Places = Mapping[str, tuple[int, int, str]]
"""The places of the zstd dictionaries in an object, by kind: start, length, and first half of the SHA-256."""


class PayloadKey(NamedTuple):
    """The key of a payload: tenant, id, the time of its insertion (with a time zone), and kind."""

    tenant: str
    id: str
    inserted_at: datetime
    kind: str

    @property
    def day(self) -> date:
        """The day in UTC to whose partition the payload belongs."""
        return self.inserted_at.astimezone(UTC).date()

    @property
    def place(self) -> tuple[str, str, str, datetime]:
        """The sort key of payloads. It sorts texts by code points, as PostgreSQL does."""
        return self.kind, self.tenant, self.id, self.inserted_at

    def __str__(self) -> str:
        return f"{self.kind} {self.id!r} of tenant {self.tenant!r} at {self.inserted_at.isoformat()}"


def checked(key: Sequence[Any]) -> PayloadKey:
    """Returns a checked key, with its time in UTC. Raises `InvalidPayload`, which describes the fault."""
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
            f"inserted_at must be a datetime with a time zone, such as datetime.now(UTC), not {at!r}"
        )
    try:
        return made._replace(inserted_at=at.astimezone(UTC))
    except OverflowError:
        raise InvalidPayload(f"inserted_at {at.isoformat()} is not in the years 1 to 9999 in UTC") from None


def check_application_kind(kind: str) -> None:
    """Raises `InvalidPayload` for a kind that belongs to payloads of Dormouse itself."""
    if kind.startswith(OWN_KINDS):
        raise InvalidPayload(f"kind {kind!r}: kinds that begin with {OWN_KINDS!r} are for jobs of Dormouse")


def place_values(name: str, key: PayloadKey | None) -> dict[str, Any]:
    """Returns the parts of a key as statement parameters, whose names begin with `name`, such as after_kind.

    Without a key, all values are None.
    """
    place = (None,) * len(_PLACE) if key is None else key.place
    return {f"{name}_{part}": value for part, value in zip(_PLACE, place, strict=True)}


def columns(keys: Iterable[PayloadKey]) -> dict[str, list[Any]]:
    """Returns keys as four lists, one for each part of a key, by the names of statement parameters."""
    listed = list(keys)
    return {
        "kinds": [key.kind for key in listed],
        "tenants": [key.tenant for key in listed],
        "ids": [key.id for key in listed],
        "times": [key.inserted_at for key in listed],
    }


CONTENT_BYTES_MAX = 64 * 2**20
"""The most bytes of a payload's JSON in UTF-8."""

NESTING_MAX = 500
"""The deepest nesting of arrays and objects, which is half of the nesting that Python can read and write."""

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')
_EXPONENTS = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d(?:\.\d+)?e\+\d+)')
_SIMPLE = (str, int, float, bool, type(None))


def encode_given(given: object) -> tuple[PayloadKey, str]:
    """Returns the key and the JSON text of a (tenant, id, inserted_at, kind, content) tuple.

    Raises `InvalidPayload`.
    """
    if not isinstance(given, Sequence) or len(given) != 5:
        raise InvalidPayload(f"a payload is (tenant, id, inserted_at, kind, content), not {given!r}")
    key = checked(given[:4])
    check_application_kind(key.kind)
    return key, encode(key, given[4])


def encode(key: PayloadKey, content: Any) -> str:
    """Returns the content of a payload as JSON text.

    Raises `InvalidPayload` if the content is not a JSON value, is too large or has too deep nesting.
    """
    try:
        text = json_text(content)
        size = len(text) if text.isascii() else len(text.encode())
        if not _is_same(json.loads(text), content):
            raise InvalidPayload(f"payload {key} is not JSON: {_fault(content)}")
    except InvalidPayload:
        raise
    except UnicodeEncodeError:
        raise InvalidPayload(f"payload {key} has a lone surrogate, which UTF-8 cannot encode") from None
    except RecursionError:
        raise _too_deep(key) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidPayload(f"payload {key} is not JSON: {_reason(content, error)}") from None
    if size > CONTENT_BYTES_MAX:
        raise InvalidPayload(
            f"payload {key} has {size:,} bytes of JSON; the limit is {CONTENT_BYTES_MAX:,}: divide it"
        )
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidPayload(f"payload {key} has the character NUL (\\u0000), which PostgreSQL cannot hold")
    if text.count("[") + text.count("{") > NESTING_MAX and _depth(text) > NESTING_MAX:
        raise _too_deep(key)
    return _EXPONENTS.sub(_written_out, text) if "e+" in text else text


def decode(text: str | bytes) -> Any:
    """Returns the value of JSON text that PostgreSQL wrote."""
    return json.loads(text)


def _is_same(read: Any, given: Any) -> bool:
    # Python writes some values that are not JSON in another form: `_fault` finds and names them
    return bool(read == given) or _fault(given) is None


def _fault(value: Any, where: str = "it") -> str | None:
    """Returns the reason why a value is not JSON, or None if it is JSON. Tuples count as arrays."""
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
        return f"{where} is {value!r}, which JSON does not have"
    return None if isinstance(value, _SIMPLE) else f"{where} is of type {type(value).__name__}"


def _reason(content: Any, error: Exception) -> str:
    try:
        return _fault(content) or str(error)
    except RecursionError:  # the content contains itself
        return str(error)


def _too_deep(key: PayloadKey) -> InvalidPayload:
    return InvalidPayload(f"payload {key} nests more than {NESTING_MAX} arrays and objects in each other")


def _depth(text: str) -> int:
    deepest = depth = 0
    for match in _BRACKETS.finditer(text):
        depth += (match[1] is not None) - (match[2] is not None)
        deepest = max(deepest, depth)
    return deepest


def _written_out(match: re.Match[str]) -> str:
    # jsonb stores 1e20 as an integer; with ".0" the number comes back as a float
    return match[0] if match[1] is None else f"{Decimal(match[1]):f}.0"
