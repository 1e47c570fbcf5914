"""What stands for Aurora: the embedded PostgreSQL behind TLS, with tokens as RDS has them.

Who is a member of `rds_iam` gives a token, which the emulator checks with its signature and the caller's
right to `rds-db:connect`; the master user, as on RDS no superuser, gives its password. While the cluster is
stopped nobody gets in.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
from psycopg import sql

from dormouse.embedded.postgres import EmbeddedPostgres
from tests.deploy_local.processes import RunFailed
from tests.tls import CertificateAuthority, TlsFront, joined

PORT = 5433
"""As stacks/database.py has it: the DSN of the lambdas has the port of the cluster."""

ADDRESSES_TRIED_MAX = 50
_MESSAGE_BYTES_MAX = 1 << 16
_INVALID_AUTHORIZATION = "28000"


class Database:
    """The cluster's server; a context manager. `control` is the URL of the emulator's control port."""

    def __init__(self, folder: Path, control: str) -> None:
        folder.mkdir()
        self._server = EmbeddedPostgres(folder, options={"fsync": "off", "log_connections": "authorization"})
        self._authority = CertificateAuthority(folder)
        self.host = free_address(PORT)
        self._control = control
        self._front: _Front | None = None

    @property
    def certificates(self) -> Path:
        """The PEM file that clients must trust."""
        return self._authority.certificate

    @property
    def refusals(self) -> list[str]:
        """Why logins were refused."""
        assert self._front is not None
        return self._front.refusals

    def owner_dsn(self, name: str = "dormouse") -> str:
        """For the run's own looks at a database, past TLS and tokens."""
        return f"{self._server.dsn} dbname={name}"

    def __enter__(self) -> Database:
        dsn = self._server.start()
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("create role rds_iam")
                conn.execute("create role rds_superuser")
            certificate, key = self._authority.server_certificate(self.host)
            self._front = _Front(certificate, key, dsn, self._control, self.host)
            self._front.__enter__()
        except BaseException:
            self._server.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            assert self._front is not None
            self._front.__exit__(kind, error, trace)
        finally:
            self._server.stop()


class _Front(TlsFront):
    def __init__(self, certificate: Path, key: Path, dsn: str, control: str, host: str) -> None:
        super().__init__(certificate, key, 0)
        self._host = host
        self._dsn = dsn
        self._socket = f"{psycopg.conninfo.conninfo_to_dict(dsn)['host']}/.s.PGSQL.5432"
        self._control = control
        self._prepared = threading.Lock()
        self.refusals: list[str] = []

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, self._host, PORT)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await _message(reader)
        if user := _user(greeting):
            refusal = await self._refusal(user, reader, writer)
            if refusal:
                self.refusals.append(refusal)
                writer.write(_error(refusal))
                await writer.drain()
                return
        from_server, to_server = await asyncio.open_unix_connection(self._socket)
        to_server.write(greeting)
        await joined((reader, writer), (from_server, to_server))

    async def _refusal(
        self, user: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str | None:
        cluster = await asyncio.to_thread(ask, self._control, "/cluster")
        if cluster["Status"] != "available":
            return f"the cluster is {cluster['Status']}"
        by_token = await asyncio.to_thread(self._takes_tokens, user, cluster)
        writer.write(b"R" + struct.pack("!ii", 8, 3))  # a password in clear, as RDS asks for tokens
        await writer.drain()
        await reader.readexactly(1)
        password = (await _message(reader))[4:].rstrip(b"\0").decode()
        if by_token:
            answer = await asyncio.to_thread(ask, self._control, "/login", user=user, token=password)
            return f"{user}: {answer['refusal']}" if answer["refusal"] else None
        if (user, password) != (cluster["MasterUsername"], cluster["MasterUserPassword"]):
            return f"{user}: neither a member of rds_iam nor the master user with its password"
        return None

    def _takes_tokens(self, user: str, cluster: Mapping[str, Any]) -> bool:
        with self._prepared, psycopg.connect(self._dsn, autocommit=True) as conn:
            _prepare(conn, cluster)
            found = conn.execute(
                "select pg_has_role(rolname, 'rds_iam', 'member') and rolname <> %s"
                " from pg_roles where rolname = %s and not rolsuper",
                [cluster["MasterUsername"], user],
            ).fetchone()
        return bool(found and found[0])


def free_address(port: int) -> str:
    """A loopback address where the port is free: the port is of the deployment, not of the machine."""
    for _ in range(ADDRESSES_TRIED_MAX):
        address = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"
        with socket.socket() as listener, suppress(OSError):
            listener.bind((address, port))
            return address
    raise RunFailed(
        f"no loopback address has port {port} free: this needs Linux, where 127.0.0.0/8 is loopback"
    )


def _prepare(conn: psycopg.Connection[Any], cluster: Mapping[str, Any]) -> None:
    """The master user and the database, as the cluster of the emulator has them."""
    master = sql.Identifier(cluster["MasterUsername"])
    if (
        conn.execute("select 1 from pg_roles where rolname = %s", [cluster["MasterUsername"]]).fetchone()
        is None
    ):
        password = sql.Literal(cluster["MasterUserPassword"])
        conn.execute(sql.SQL("create role {} login createrole createdb password {}").format(master, password))
        conn.execute(sql.SQL("grant rds_superuser to {}").format(master))
        conn.execute(sql.SQL("grant rds_iam to rds_superuser with admin option"))
    name = cluster["DatabaseName"]
    if name and conn.execute("select 1 from pg_database where datname = %s", [name]).fetchone() is None:
        conn.execute(sql.SQL("create database {} owner {}").format(sql.Identifier(name), master))


def ask(control: str, path: str, **given: Any) -> dict[str, Any]:
    """What the emulator's control port answers."""
    request = urllib.request.Request(control + path, json.dumps(given).encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        found: dict[str, Any] = json.load(answer)
    return found


async def _message(reader: asyncio.StreamReader) -> bytes:
    """With its length, without its type."""
    head = await reader.readexactly(4)
    (length,) = struct.unpack("!i", head)
    if not len(head) <= length <= _MESSAGE_BYTES_MAX:
        raise EOFError
    return head + await reader.readexactly(length - len(head))


def _user(greeting: bytes) -> str | None:
    """None for a request to cancel a query."""
    words = greeting[8:].split(b"\0")
    values = dict(zip(words[::2], words[1::2], strict=False))
    return values[b"user"].decode() if b"user" in values else None


def _error(message: str) -> bytes:
    fields = f"SFATAL\0VFATAL\0C{_INVALID_AUTHORIZATION}\0M{message}\0\0".encode()
    return b"E" + struct.pack("!i", 4 + len(fields)) + fields
