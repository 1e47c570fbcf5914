"""The stand-in for Aurora: the embedded PostgreSQL behind TLS, with the logins of RDS.

- A member of `rds_iam` logs in with a token. The emulator checks the token's signature and the caller's right
  to `rds-db:connect`.
- The master user is no superuser. It logs in with its password until it makes roles members of `rds_iam`,
  which makes it a member itself.
- While the cluster is stopped, all logins are refused.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
from psycopg import sql

from tests.deploy_local.processes import RunFailed
from tests.support.embedded import EmbeddedPostgres
from tests.tls import AskingFront, CertificateAuthority

PORT = 5433
"""The port in stacks/database.py. The DSN of the lambdas names it."""

ADDRESSES_TRIED_MAX = 50

# Any membership counts, as for `+rds_iam` in pg_hba.conf: also the master user's in roles that it created.
# The path through rds_superuser does not count: on RDS it lets the master user grant rds_iam, no more.
_MEMBER = """
with recursive role as (
    select oid from pg_roles where rolname = %s and not rolsuper
    union
    select m.roleid from role join pg_auth_members m on m.member = role.oid
    where m.roleid <> 'rds_superuser'::regrole
)
select from role where oid = 'rds_iam'::regrole
"""


class Database:
    """The server of the cluster, as a context manager. `control` is the URL of the emulator's control
    port.
    """

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
        """The reasons of refused logins."""
        assert self._front is not None
        return self._front.refusals

    def owner_dsn(self, name: str = "dormouse") -> str:
        """Returns a DSN for the run's own reads of a database, without TLS and tokens."""
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


class _Front(AskingFront):
    def __init__(self, certificate: Path, key: Path, dsn: str, control: str, host: str) -> None:
        super().__init__(certificate, key, f"{psycopg.conninfo.conninfo_to_dict(dsn)['host']}/.s.PGSQL.5432")
        self._host = host
        self._dsn = dsn
        self._control = control
        self._prepared = threading.Lock()
        self.refusals: list[str] = []

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, self._host, PORT)

    def _refusal(self, user: str, password: str) -> str | None:
        why = self._why_not(user, password)
        if why is not None:
            self.refusals.append(why)
        return why

    def _why_not(self, user: str, password: str) -> str | None:
        cluster = ask(self._control, "/cluster")
        if cluster["Status"] != "available":
            return f"the cluster is {cluster['Status']}"
        if self._takes_tokens(user, cluster):
            answer = ask(self._control, "/login", user=user, token=password)
            return f"{user}: {answer['refusal']}" if answer["refusal"] else None
        if (user, password) != (cluster["MasterUsername"], cluster["MasterUserPassword"]):
            return f"{user}: neither a member of rds_iam nor the master user with its password"
        return None

    def _takes_tokens(self, user: str, cluster: Mapping[str, Any]) -> bool:
        with self._prepared, psycopg.connect(self._dsn, autocommit=True) as conn:
            _prepare(conn, cluster)
            return conn.execute(_MEMBER, [user]).fetchone() is not None


def free_address(port: int) -> str:
    """Returns a loopback address on which the port is free, because the deployment needs this very port."""
    for _ in range(ADDRESSES_TRIED_MAX):
        address = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"
        with socket.socket() as listener, suppress(OSError):
            listener.bind((address, port))
            return address
    raise RunFailed(
        f"no loopback address has port {port} free: this needs Linux, where 127.0.0.0/8 is loopback"
    )


def _prepare(conn: psycopg.Connection[Any], cluster: Mapping[str, Any]) -> None:
    """Creates the master user and the database that the emulated cluster describes, if they are missing."""
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


def ask(control: str, path: str, **parameters: Any) -> dict[str, Any]:
    """Sends a request to the emulator's control port and returns the answer."""
    request = urllib.request.Request(control + path, json.dumps(parameters).encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        body: dict[str, Any] = json.load(answer)
    return body
