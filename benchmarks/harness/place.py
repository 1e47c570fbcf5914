"""A temporary PostgreSQL with its durable defaults and a temporary folder, for one benchmark."""

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
    """A folder and a PostgreSQL server with the database of an instance. More databases can be created."""

    dsn: str = field(repr=False)
    folder: Path

    @property
    def objects(self) -> str:
        return f"file://{self.folder}/objects"

    def database(self, name: str) -> str:
        """Returns a connection string for another database of the same server."""
        return make_conninfo(self.dsn, dbname=name)

    def create_database(self, name: str) -> str:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f"create database {name}")
        return self.database(name)

    def iceberg(self, database: str) -> Any:
        """Returns PyIceberg's SQL catalog in a database of the server."""
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
    """Starts a private server with a private folder; stops the server and deletes both at the end."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    with temporary_folder() as folder, EmbeddedPostgres(folder / "server", options=server_options) as server:
        place = Place(make_conninfo(server.dsn, dbname="benchmark"), folder)
        Place(server.dsn, folder).create_database("benchmark")
        try:
            with dm.connect(place.dsn, place.objects):  # binds the database to the store
                pass
            yield place
        finally:
            # the stopping server need not write a dropped database to disk
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("drop database benchmark with (force)")
