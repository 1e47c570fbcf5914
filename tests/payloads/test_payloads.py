"""Hot payloads. `get` returns the content that `put` took, and invalid payloads are refused before any is
stored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dormouse as dm
from dormouse.errors import InvalidPayload, PayloadNotFound
from dormouse.payloads.keys import CONTENT_BYTES_MAX, NESTING_MAX
from tests.stored import query
from tests.support.api import Instance
from tests.support.jobs import PayloadStore

DAY = datetime(2026, 3, 5, 12, tzinfo=UTC)


@pytest.fixture
def payloads(instance: Instance) -> PayloadStore:
    return instance.payloads


@pytest.fixture(scope="module")
def shared(own_database: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayloadStore]:
    folder: Path = tmp_path_factory.mktemp("payloads")
    with dm.connect(own_database[0], folder.as_uri()) as instance:
        yield instance.payloads


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab\\u0\n"é𝄞', max_size=6), inner),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES)
def test_get_returns_what_put_took(shared: PayloadStore, content: Any) -> None:
    shared.put("t", "i", DAY, "request", content)
    found = shared.get("t", "i", DAY, "request")
    assert found == content
    assert repr(found).count(".") == repr(content).count(".") or "e" in repr(content)  # a float stays a float


def test_floats_stay_floats(payloads: PayloadStore) -> None:
    content = [1e23, 1e308, -2.5e300, 1.0, 5e-324, 0.1, "1e+23", {"1e+5": "a\\"}]
    payloads.put("t", "i", DAY, "k", content)
    found = payloads.get("t", "i", DAY, "k")
    assert found == content
    assert [type(one) for one in found] == [type(one) for one in content]


def test_put_replaces_and_delete_deletes(payloads: PayloadStore) -> None:
    payloads.put("t", "i", DAY, "k", {"n": 1})
    payloads.put("t", "i", DAY, "k", None)
    assert payloads.get("t", "i", DAY, "k") is None
    payloads.delete("t", "i", DAY, "k")
    payloads.delete("t", "i", DAY, "k")
    payloads.delete("t", "i", DAY - timedelta(days=400), "k")
    with pytest.raises(PayloadNotFound, match="there is no payload k 'i' of tenant 't' at 2026-03-05T12:00"):
        payloads.get("t", "i", DAY, "k")
    with pytest.raises(PayloadNotFound):
        payloads.get("t", "i", DAY - timedelta(days=400), "k")


def test_put_many_and_get_many_span_days_and_time_zones(payloads: PayloadStore) -> None:
    east = timezone(timedelta(hours=14))
    items = [("t", str(n), DAY + timedelta(days=n % 5), "k", n) for n in range(50)]
    payloads.put_many([*items, ("t", "0", DAY, "k", "the last")])
    found = payloads.get_many([(*item[:2], item[2].astimezone(east), item[3]) for item in items])
    assert list(found.values()) == ["the last", *range(1, 50)]
    assert found[("t", "1", items[1][2], "k")] == 1
    assert len(payloads.get_many([*found, ("u", "0", DAY, "k")])) == 51
    assert isinstance(payloads.get_many([("u", "0", DAY, "k")])["u", "0", DAY, "k"], PayloadNotFound)
    payloads.put_many([])
    assert payloads.get_many([]) == {}


def test_days_are_utc_in_any_time_zone_of_the_session(instance: Instance, dsn: str) -> None:
    """The day is made in a session with another time zone."""
    late = datetime(2026, 3, 5, 23, 59, 59, 999_999, tzinfo=UTC)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "set search_path = dormouse; set timezone = 'Pacific/Kiritimati'; set datestyle = 'German'"
        )
        conn.execute("select add_day('payload', '2026-03-05')")
    instance.payloads.put("t", "i", late, "k", 1)
    assert query(instance._supplier, "select tableoid::regclass::text from payload") == [
        ("payload_20260305",)
    ]
    assert instance.payloads.get("t", "i", late, "k") == 1


def test_a_missing_day_is_made_by_the_first_put(payloads: PayloadStore) -> None:
    threads = [
        threading.Thread(target=payloads.put, args=("t", str(n), DAY + timedelta(days=n % 2), "k", n))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [payloads.get("t", str(n), DAY + timedelta(days=n % 2), "k") for n in range(8)] == list(range(8))


def nested(depth: int) -> Any:
    content: Any = 0
    for _ in range(depth):
        content = [content]
    return content


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a\x00b", "NUL"),
        ({"a\x00": 1}, "NUL"),
        (["\\\x00"], "NUL"),
        ("\ud800", "lone surrogate"),
        ({"\udc00": 1}, "lone surrogate"),
        (float("nan"), "it is nan, which JSON does not have"),
        ([1, {"a": float("inf")}], r"it\[1\]\['a'\] is inf"),
        ({1: 2}, "it has the name 1, and names are text"),
        ({"a": {None: 2}}, r"it\['a'\] has the name None"),
        (b"bytes", "it is of type bytes"),
        ([{1, 2}], r"it\[0\] is of type set"),
        (DAY, "it is of type datetime"),
        (10**5000, "digits"),
        (nested(NESTING_MAX + 1), "nests more than 500"),
        (nested(1_000), "nests more than 500"),
        (nested(100_000), "nests more than 500"),
        (ITSELF, "Circular reference"),
        ("x" * CONTENT_BYTES_MAX, "67,108,866 bytes of JSON; the limit is 67,108,864"),
    ],
    ids=lambda value: (
        value[:20] if isinstance(value, str) and value[:20].isascii() and value[:20].isprintable() else ""
    ),
)
def test_an_invalid_payload_is_refused_and_no_batch_is_half_stored(
    payloads: PayloadStore, content: Any, why: str
) -> None:
    with pytest.raises(InvalidPayload, match=why) as refused:
        payloads.put_many([("t", "a", DAY, "k", 1), ("t", "b", DAY, "k", content)])
    assert "k 'b' of tenant 't'" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert isinstance(payloads.get_many([("t", "a", DAY, "k")])["t", "a", DAY, "k"], PayloadNotFound)


def test_large_and_deeply_nested_contents_are_stored(payloads: PayloadStore) -> None:
    contents = ["x" * 2**20, nested(NESTING_MAX), "\\u0000", ["\\", "\\\\u0000"], (1, (2,))]
    payloads.put_many(("t", str(n), DAY, "k", content) for n, content in enumerate(contents))
    found = payloads.get_many([("t", str(n), DAY, "k") for n in range(len(contents))])
    assert list(found.values()) == [*contents[:-1], [1, [2]]]


@pytest.mark.slow
def test_the_largest_content_is_stored(payloads: PayloadStore) -> None:
    payloads.put("t", "i", DAY, "k", "x" * (CONTENT_BYTES_MAX - 2))
    assert len(payloads.get("t", "i", DAY, "k")) == CONTENT_BYTES_MAX - 2


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (("", "i", DAY, "k"), "the tenant of a payload must be a non-empty string"),
        (("t", 5, DAY, "k"), "the id of a payload must be a non-empty string, not 5"),
        (("t", "i", DAY, "k" * 513), "the kind of a payload"),
        (("t", "a\x00", DAY, "k"), "no NUL"),
        (("t", "\ud800", DAY, "k"), "not valid Unicode"),
        (("t", "i", DAY.replace(tzinfo=None), "k"), "inserted_at must be a datetime with a time zone"),
        (("t", "i", "2026-03-05", "k"), "inserted_at must be a datetime with a time zone"),
        (
            ("t", "i", datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "k"),
            "not in the years 1 to 9999",
        ),
        (("t", "i", DAY), r"a payload's key is \(tenant, id, inserted_at, kind\)"),
    ],
)
def test_invalid_keys_are_refused(payloads: PayloadStore, key: Any, why: str) -> None:
    with pytest.raises(InvalidPayload, match=why):
        payloads.get_many([("t", "i", DAY, "k"), key])
    with pytest.raises(InvalidPayload):
        payloads.put_many([(*key, 1)])
    with pytest.raises(InvalidPayload):
        payloads.delete_many([key])


def test_a_payload_needs_five_parts(payloads: PayloadStore) -> None:
    with pytest.raises(InvalidPayload, match="a payload is"):
        payloads.put_many([5])  # type: ignore[list-item]


def test_the_largest_keys_fit_an_index_entry(payloads: PayloadStore) -> None:
    long = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=512)) for _ in range(3)]
    payloads.put(long[0], long[1], DAY, long[2], 1)
    assert payloads.get(long[0], long[1], DAY, long[2]) == 1


def test_payloads_of_any_year_are_stored(payloads: PayloadStore) -> None:
    for day in (datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)):
        payloads.put("t", "i", day, "k", day.year)
        assert payloads.get("t", "i", day, "k") == day.year


def test_a_role_that_may_only_write_rows_can_make_days(instance: Instance) -> None:
    """The roles are those of a deployment."""
    query(instance._supplier, "drop role if exists writes_rows; create role writes_rows")
    query(instance._supplier, "grant usage on schema dormouse to writes_rows")
    query(instance._supplier, "grant execute on function add_day to writes_rows")
    query(instance._supplier, "set role writes_rows; select add_day('payload', '2026-03-05'); reset role")
    instance.payloads.put("t", "i", DAY, "k", 1)
    query(instance._supplier, "drop owned by writes_rows; drop role writes_rows")
