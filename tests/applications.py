"""An application with its own table and role in the database of an instance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import make_conninfo

ROLE = "application_of_payloads"
PUT = "select dormouse.put_payload(%s, %s, %s, %s, %s::jsonb)"


@contextmanager
def application_of(dsn: str) -> Iterator[str]:
    """Yields the DSN of an application that owns a table and has the rights that the documentation grants."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"create role {ROLE} login; create schema app authorization {ROLE}")
        conn.execute(f"create table app.request (id text); alter table app.request owner to {ROLE}")
        conn.execute(f"grant usage on schema dormouse to {ROLE}")
        conn.execute(f"grant execute on function dormouse.put_payload, dormouse.put_payloads to {ROLE}")
        yield make_conninfo(dsn, user=ROLE)
        conn.execute(f"drop owned by {ROLE} cascade; drop role {ROLE}")


def requests(application: str) -> list[str]:
    """Returns the ids of the application's own rows."""
    with psycopg.connect(application) as conn:
        return [id_ for (id_,) in conn.execute("select id from app.request order by 1")]
