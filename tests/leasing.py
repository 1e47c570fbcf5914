"""A lease for tests, with SQL of its own, which each user of `dormouse.postgres.lease` must supply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from uuid import uuid4

from dormouse.errors import RowLockLost, TableBusy
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.lease import Lease, Pulse, held_by, this_holder, wait_for
from dormouse.postgres.queries import parse

QUERIES = parse(
    """
-- name: create
-- Creates the table of the lease.
create table leased (name text primary key, token uuid, holder text, leased_until timestamptz);

-- name: take
-- Takes the lease, unless another holder has it.
insert into leased as l
values ('work', %(token)s, %(holder)s, clock_timestamp() + make_interval(secs => %(lease_seconds)s))
on conflict (name) do update
set token = excluded.token, holder = excluded.holder, leased_until = excluded.leased_until
where l.leased_until < clock_timestamp()
returning token;

-- name: holder
-- Returns the holder and the time of expiry.
select holder, leased_until from leased;

-- name: renew
-- Renews the lease; returns no row if another holder has it.
update leased set leased_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
where token = %(token)s
returning token;

-- name: fence
-- Locks the lease within a transaction of the work; returns no row if another holder has it.
select token from leased where token = %(token)s for update;

-- name: release
-- Releases the lease.
delete from leased where token = %(token)s;
""",
    "tests/leasing.py",
)


def lease_of(supplier: ConnectionSupplier, seconds: float) -> Lease:
    values = {"token": uuid4(), "lease_seconds": seconds}
    lost = partial(RowLockLost, "another worker has the work", table="t")
    return Lease(supplier, "test", "of the work", QUERIES, values, lost)


@contextmanager
def held(
    supplier: ConnectionSupplier, seconds: float = 1.0, wait_seconds: float = 0.0
) -> Iterator[tuple[Lease, Pulse]]:
    lease = lease_of(supplier, seconds)

    def take(_: float) -> Lease | TableBusy:
        if lease.execute("take", holder=this_holder()):
            return lease
        holders = lease.execute("holder")
        return TableBusy(held_by(holders[0][0], "has the work", holders[0][1]) if holders else "try again")

    wait_for(take, wait_seconds)
    try:
        with lease.pulse() as pulse:
            yield lease, pulse
    finally:
        lease.release()
