"""DSNs with IAM authentication: each connection gets a new token, over TLS that verifies the server."""

from __future__ import annotations

import shutil
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import psycopg
import pytest
from embedded import on_tcp
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from dormouse.errors import InstanceError, InvalidInput
from dormouse.postgres import ConnectionSupplier, session
from dormouse.postgres.session import Isolation, describe, session_conninfo
from tests.support.embedded import EmbeddedPostgres
from tests.tls import CertificateAuthority, TlsFront

HOST = "db.example.com"
DSN = f"rds-iam://dormouse_run@{HOST}:5433/lake?region=eu-west-1"
PASSWORD = "host:5432/?Action=connect&DBUser=x"  # noqa: S105


@pytest.fixture(scope="module")
def authority() -> Iterator[CertificateAuthority]:
    folder = Path(tempfile.mkdtemp(prefix="dormouse-tls-"))
    yield CertificateAuthority(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def port(authority: CertificateAuthority) -> Iterator[int]:
    """Yields the port of a TLS server, at which the token is the password of the role `app`."""
    folder = Path(tempfile.mkdtemp(prefix="dormouse-tls-"))
    try:
        with EmbeddedPostgres(folder, options={"fsync": "off", **on_tcp()}) as server:
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                make = sql.SQL("create role app login password {}").format(sql.Literal(PASSWORD))
                conn.execute(make)
            own_port = int(conninfo_to_dict(server.dsn)["port"])
            with TlsFront(*authority.server_certificate("localhost"), own_port) as front:
                yield front.port
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    session._session.cache_clear()
    yield
    session._session.cache_clear()


def conninfo(dsn: str, **more: Any) -> str:
    given: dict[str, Any] = {"application_name": "test", "read_only": False} | more
    return session_conninfo(dsn, isolation=Isolation.READ_COMMITTED, **given)


def parts(dsn: str) -> dict[str, Any]:
    return conninfo_to_dict(session.with_token(conninfo(dsn)))


def test_the_password_is_a_token_for_this_user_and_server() -> None:
    token = urlsplit("//" + parts(DSN)["password"])
    query = parse_qs(token.query)
    assert (token.hostname, token.port, query["Action"], query["DBUser"]) == (
        HOST,
        5433,
        ["connect"],
        ["dormouse_run"],
    )
    (credential,) = query["X-Amz-Credential"]
    assert credential.startswith("AKIDEXAMPLE/")
    assert credential.endswith("/eu-west-1/rds-db/aws4_request")
    assert query["X-Amz-Expires"] == ["900"]


def test_the_server_is_verified_and_has_time_to_wake() -> None:
    given = parts(DSN)
    assert (given["sslmode"], given["sslrootcert"]) == ("verify-full", str(session.CA_BUNDLE))
    assert int(given["connect_timeout"]) > 30


def test_the_bundle_has_the_roots_of_amazon_rds_only() -> None:
    context = ssl.create_default_context(cafile=session.CA_BUNDLE)
    certificates = context.get_ca_certs()
    names = {str(certificate["subject"]) for certificate in certificates}
    assert len(certificates) > 80
    assert [name for name in names if "Amazon" not in name and "Starfield" not in name] == []
    assert any("eu-west-2 Root CA RSA2048 G1" in name for name in names)


def test_the_dsn_may_name_other_certificates_and_modes() -> None:
    given = parts(f"{DSN}&sslrootcert=/x.pem&connect_timeout=50")
    assert (given["sslrootcert"], given["connect_timeout"], given["sslmode"]) == (
        "/x.pem",
        "50",
        "verify-full",
    )


def test_a_proxy_gets_no_session_settings() -> None:
    assert "search_path" in parts(DSN)["options"]
    assert "options" not in parts(f"{DSN}&proxy=true")


def test_each_connection_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["first", "second"])
    monkeypatch.setattr(session, "_token", lambda *_: next(tokens))
    text = conninfo(DSN)
    assert [conninfo_to_dict(session.with_token(text))["password"] for _ in range(2)] == ["first", "second"]


@pytest.mark.parametrize(
    "dsn",
    [
        "rds-iam://",
        "rds-iam://host/db",
        f"rds-iam://user@{HOST}/db",
        f"rds-iam://user:password@{HOST}/db?region=eu-west-1",
        "rds-iam://user@/db?region=eu-west-1",
    ],
)
def test_a_missing_part_of_a_dsn_is_reported_in_one_line(dsn: str) -> None:
    with pytest.raises(InvalidInput, match="rds-iam://user@host:5432/database"):
        ConnectionSupplier(dsn)


def test_no_credentials_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InstanceError, match="no AWS credentials to connect to db"):
        session.with_token(conninfo(DSN))


def test_neither_token_nor_placeholder_is_shown() -> None:
    assert describe(conninfo(DSN)) == f"PostgreSQL at {HOST}:5433, database 'lake'"


@pytest.mark.slow
def test_the_token_is_the_password_over_tls(
    port: int, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_token", lambda *_: PASSWORD)
    dsn = f"rds-iam://app@localhost:{port}/postgres?region=eu-west-1&sslrootcert={authority.certificate}"
    supplier = ConnectionSupplier(dsn)
    with closing(supplier), supplier.connection() as conn:
        row = conn.execute("select current_user::text, current_setting('search_path')").fetchone()
        assert conn.pgconn.ssl_in_use
    assert row == ("app", "dormouse")


@pytest.mark.few(1)
@pytest.mark.parametrize("bundle", ["ours", "amazon"])
def test_another_server_gets_no_token(
    bundle: str, port: int, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's certificate is for another host, or an unknown authority signed it."""
    monkeypatch.setattr(session, "_token", lambda *_: PASSWORD)
    host, more = ("localhost", "") if bundle == "amazon" else ("127.0.0.1", "")
    if bundle == "ours":
        more = f"&sslrootcert={quote(str(authority.certificate))}"
    supplier = ConnectionSupplier(f"rds-iam://app@{host}:{port}/postgres?region=eu-west-1{more}")
    with pytest.raises(InstanceError, match="certificate") as caught, supplier.connection():
        pass
    assert PASSWORD not in str(caught.value)
