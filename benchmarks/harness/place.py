"""Where a benchmark measures: a PostgreSQL with its durable defaults and a folder, both gone at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm


@dataclass(frozen=True)
class Place:
    """A database that is an instance's, beside which others can be made; and a folder."""

    dsn: str = field(repr=False)
    folder: Path

    @property
    def objects(self) -> str:
        return f"file://{self.folder}/objects"

    def database(self, name: str) -> str:
        """A connection string for another database of the same server."""
        return make_conninfo(self.dsn, dbname=name)

    def create_database(self, name: str) -> str:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f"create database {name}")
        return self.database(name)

    def iceberg(self, database: str) -> Any:
        """PyIceberg's SQL catalog in a database of the server."""
        from pyiceberg.catalog.sql import SqlCatalog

        server = conninfo_to_dict(self.dsn)
        uri = (
            f"postgresql+psycopg2://{server['user']}@/{database}?host={server['host']}&port={server['port']}"
        )
        return SqlCatalog(database, uri=uri, warehouse=f"file://{self.folder}/{database}")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="dormouse-benchmark-") as folder:
        yield Path(folder)


@contextmanager
def own_place(server_options: Mapping[str, str] | None = None) -> Iterator[Place]:
    """A server and a folder of its own."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    with temporary_folder() as folder, EmbeddedPostgres(folder / "server", options=server_options) as server:
        place = Place(make_conninfo(server.dsn, dbname="benchmark"), folder)
        Place(server.dsn, folder).create_database("benchmark")
        try:
            with dm.connect(place.dsn, place.objects):  # database and store know each other from then on
                pass
            yield place
        finally:
            # what is dropped need not be written to disk when the server stops
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("drop database benchmark with (force)")
