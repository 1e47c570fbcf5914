"""Folders of servers, counters to update, and commit queues."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from queues import queue_numbers

from dormouse.embedded import server
from dormouse.postgres import ConnectionSupplier
from tests.cloudformation import CloudFormation
from tests.databases import name_of
from tests.support.commits import PostgresQueue
from tests.support.embedded import EmbeddedPostgres


@pytest.fixture
def cloudformation() -> Iterator[CloudFormation]:
    """What waits for the answer of a custom resource."""
    stack = CloudFormation()
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def own_database(
    new_database: Callable[[str], str], template_database: str
) -> Iterator[tuple[str, ConnectionSupplier]]:
    """A database of the module's own, for what its tests only read, and connections to it."""
    dsn = new_database(template_database)
    with closing(ConnectionSupplier(dsn)) as supplier:
        yield dsn, supplier


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose server was set up and stopped, to be copied."""
    folder = tmp_path_factory.mktemp("prepared")
    with EmbeddedPostgres(folder):
        pass
    return folder


@pytest.fixture
def server_folder(prepared_folder: Path) -> Iterator[Path]:
    """A folder whose server does not run yet."""
    parent = Path(tempfile.mkdtemp(prefix="dormouse-embedded-"))
    folder = parent / "lake"
    subprocess.run(["cp", "-a", prepared_folder, folder], check=True)
    yield folder
    for process in server._processes_in(folder / "postgres"):
        process.kill()
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def counted(supplier: ConnectionSupplier) -> ConnectionSupplier:
    """A supplier on a database with a table of two counters."""
    with supplier.connection() as conn:
        conn.execute("create table counter (id integer primary key, n integer not null)")
        conn.execute("insert into counter values (1, 0), (2, 0)")
    return supplier


@pytest.fixture
def number() -> int:
    """The number of a queue of the test's own, in the shared database."""
    return next(queue_numbers)


@pytest.fixture
def dsn_of_all(shared_supplier: tuple[str, ConnectionSupplier]) -> str:
    return shared_supplier[0]


@pytest.fixture
def lender(shared_supplier: tuple[str, ConnectionSupplier]) -> ConnectionSupplier:
    return shared_supplier[1]


@pytest.fixture
def queue(lender: ConnectionSupplier, number: int) -> PostgresQueue:
    """An empty queue in the shared database."""
    return PostgresQueue(lender, number)


@pytest.fixture
def dropped(dsn: str) -> Any:
    """Names of databases that go at the end."""
    names: list[str] = []
    yield names
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
        for name in names:
            conn.execute(f"drop database {name} with (force)")


@pytest.fixture
def copied(dsn: str, dropped: list[str]) -> Callable[[], str]:
    """A copy of the database as it is now, which nobody may have open: gives its DSN."""

    def copy() -> str:
        dropped.append(name := f"{name_of(dsn)}_copy_{len(dropped)}")
        with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
                [name_of(dsn)],
            )
            conn.execute(f"create database {name} template {name_of(dsn)}")
        return make_conninfo(dsn, dbname=name)

    return copy
