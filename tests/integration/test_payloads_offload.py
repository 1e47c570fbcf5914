"""A day is cooled down: nothing changes for who reads and writes, whatever happens meanwhile."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from dormouse.instance import Instance
from dormouse.payloads.copying import PayloadOptions
from tests.state import query

DAY = date(2026, 3, 5)
AT = datetime(2026, 3, 5, 12, tzinfo=UTC)


def items(count, at=AT):
    return [
        ("t%d" % (n % 3), "i%06d" % n, at + timedelta(seconds=n % 7), "k%d" % (n % 2), {"n": n, "text": "some text " * (n % 50)})
        for n in range(count)
    ]


def test_a_day_is_offloaded(instance: Instance) -> None:
    given = items(500)
    instance.payloads.put_many(given)
    report = instance.payloads.offload()
    assert report.errors == ()
    print(report, instance.payloads.days(), instance.payloads.status())
    assert query(instance._supplier, "select location, count(*) from payload group by 1") == [("external", 500)]
    found = instance.payloads.get_many([one[:4] for one in given])
    assert list(found.values()) == [one[4] for one in given]
