"""The login of the master user on a PostgreSQL whose pg_hba.conf demands tokens from members of `rds_iam`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from embedded import on_tcp
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.postgres import session
from lambdas.migrate import PHYSICAL_ID, handler
from tests.aws_lambda import Context
from tests.cloudformation import CloudFormation, migration
from tests.support.embedded import EmbeddedPostgres
from tests.tls import AskingFront, CertificateAuthority

PASSWORD = "s3cret-of-the-master"  # noqa: S105
TOKEN = "localhost/?Action=connect&DBUser=master"  # noqa: S105
RULES = """
local all all trust
host tokens {members} 127.0.0.1/32 trust
host tokens all 127.0.0.1/32 reject
host all {members} 127.0.0.1/32 reject
host all all 127.0.0.1/32 scram-sha-256
"""
"""The rules of pg_hba.conf. Only the database `tokens` admits members without a password.

The front connects to it for a user with the right token.
"""

ANSWERS = {
    "a member from the first": "+rds_iam",  # as an administrator, which counts as a member
    "a member by the roles that it has made": "+dormouse_run",
    "no member": "nobody",
}
"""The forms that AWS's rule for the master user can have, each with the users that the rule covers."""

WAYS = {
    "a member from the first": {"token"},
    "a member by the roles that it has made": {"password", "token"},
    "no member": {"password"},
}


class Front(AskingFront):
    """A front that admits members by `token` and other users by password; pg_hba.conf lists the members."""

    def __init__(self, certificate: Path, key: Path, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        super().__init__(certificate, key, f"{given['host']}/.s.PGSQL.{given['port']}")
        self._tcp = make_conninfo(host="127.0.0.1", port=given["port"])
        self.token: str | None = TOKEN
        self.let_in: list[str] = []

    def _refusal(self, user: str, password: str) -> str | None:
        way, database = ("token", "tokens") if password == self.token else ("password", "postgres")
        try:
            psycopg.connect(make_conninfo(self._tcp, user=user, password=password, dbname=database)).close()
        except psycopg.OperationalError as error:
            return str(error)
        self.let_in.append(way)
        return None


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dormouse-tls-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Yields the superuser's DSN of a server."""
    with EmbeddedPostgres(folder / "instance", options={"fsync": "off", **on_tcp()}) as running:
        with psycopg.connect(running.dsn, autocommit=True) as conn:
            conn.execute("create role rds_iam")
            make = "create role master login createrole password {}"
            conn.execute(sql.SQL(make).format(sql.Literal(PASSWORD)))
            conn.execute("create database tokens")
        yield running.dsn


@pytest.fixture
def front(server: str, folder: Path) -> Iterator[Front]:
    """Yields a front for a server with an empty database of the master user, without Dormouse's roles."""
    authority = CertificateAuthority(folder)
    with psycopg.connect(server, autocommit=True) as conn:
        conn.execute("create database dormouse owner master")
        conn.execute("grant rds_iam to master with admin true, inherit false, set false")
        with Front(*authority.server_certificate("localhost"), server) as running:
            yield running
        conn.execute("drop database dormouse with (force)")
        for name in ("owner", "run", "read", "schema"):
            conn.execute(f"drop role if exists dormouse_{name}")


@pytest.fixture
def cloudformation(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Iterator[CloudFormation]:
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    monkeypatch.setenv("DORMOUSE_CA_BUNDLE", str(folder / "ca.pem"))
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.3")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setattr(
        session, "_token", lambda host, port, user, region: f"{host}/?Action=connect&DBUser={user}"
    )
    stack = CloudFormation()
    yield stack
    stack.close()


def rule(server: str, folder: Path, members: str) -> None:
    """Makes pg_hba.conf refuse the passwords of `members`; waits until the server has read the file."""
    with psycopg.connect(server, autocommit=True) as conn:
        [(before,)] = conn.execute("select pg_conf_load_time()").fetchall()
        (folder / "instance/postgres/pg_hba.conf").write_text(RULES.format(members=members), "utf-8")
        conn.execute("select pg_reload_conf()")
        assert conn.execute("select from pg_hba_file_rules where error is not null").rowcount == 0
    while True:
        with psycopg.connect(server) as conn:
            if conn.execute("select pg_conf_load_time() > %s", [before]).fetchall()[0][0]:
                return


@pytest.mark.slow
@pytest.mark.parametrize("answer", ANSWERS)
def test_deployments_migrate_with_each_form_of_the_rule(
    answer: str, server: str, folder: Path, front: Front, cloudformation: CloudFormation
) -> None:
    rule(server, folder, ANSWERS[answer])
    event = migration(cloudformation.url, Port=str(front.port), Password=PASSWORD)
    handler(event, Context())
    old = {**event["ResourceProperties"], "Migrations": "c1"}
    again = {"RequestType": "Update", "OldResourceProperties": old, "PhysicalResourceId": PHYSICAL_ID}
    handler({**event, **again}, Context())
    assert [(one["Status"], one["Reason"]) for one in cloudformation.answers] == [("SUCCESS", "")] * 2
    assert set(front.let_in) == WAYS[answer]


@pytest.mark.slow
def test_the_error_of_a_refused_master_user_names_both_logins(
    server: str, folder: Path, front: Front, cloudformation: CloudFormation
) -> None:
    rule(server, folder, "+rds_iam")
    front.token = None
    handler(migration(cloudformation.url, Port=str(front.port), Password=PASSWORD), Context())
    assert cloudformation.answer["Status"] == "FAILED"
    assert "rejects connection" in cloudformation.answer["Reason"]
    assert cloudformation.answer["Reason"].endswith("nor is a token of IAM taken of it")
    assert PASSWORD not in cloudformation.answer["Reason"]
