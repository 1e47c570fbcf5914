"""The migrate lambda: it answers every event of CloudFormation, and connects to the database by TLS."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from embedded import on_tcp
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.errors import InstanceTakenOver
from lambdas import answers, migrate
from lambdas.migrate import PHYSICAL_ID, begin, handler
from lambdas.services import MARGIN_SECONDS
from tests.aws_lambda import Context, lambda_service
from tests.cloudformation import Aws, CloudFormation, migration
from tests.support.api import Instance
from tests.support.aws import OWNER_ROLE, RUN_ROLE, SCHEMA_ROLE
from tests.support.embedded import EmbeddedPostgres
from tests.support.objects import open_store
from tests.support.settings import load_settings
from tests.tls import CertificateAuthority, TlsFront

PASSWORD = "s3cret-of-the-master"  # noqa: S105
NEW = "c2"
SECRET = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:rds!cluster-1-abcdef"  # noqa: S105
FUNCTION = "dormouse-dev-migrate-Migrate"


@pytest.fixture(scope="module")
def authority() -> Iterator[CertificateAuthority]:
    folder = Path(tempfile.mkdtemp(prefix="dormouse-tls-"))
    yield CertificateAuthority(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(authority: CertificateAuthority) -> Iterator[tuple[str, int]]:
    """Yields the superuser's DSN, and the TLS port, of a server with a role `master` that is no superuser."""
    folder = Path(tempfile.mkdtemp(prefix="dormouse-tls-"))
    try:
        with EmbeddedPostgres(folder, options={"fsync": "off", **on_tcp()}) as running:
            with psycopg.connect(running.dsn, autocommit=True) as conn:
                make = "create role master login createrole createdb password {}"
                conn.execute(sql.SQL(make).format(sql.Literal(PASSWORD)))
            own_port = int(conninfo_to_dict(running.dsn)["port"])
            with TlsFront(*authority.server_certificate("localhost"), own_port) as front:
                yield running.dsn, front.port
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def dsn(server: tuple[str, int]) -> Iterator[str]:
    """Yields a superuser's DSN of an empty database that the master user owns."""
    with psycopg.connect(server[0], autocommit=True) as conn:
        conn.execute("create database dormouse owner master")
        yield make_conninfo(server[0], dbname="dormouse")
        conn.execute("drop database dormouse with (force)")


@pytest.fixture
def cloudformation(
    monkeypatch: pytest.MonkeyPatch, authority: CertificateAuthority, tmp_path: Path
) -> Iterator[CloudFormation]:
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    monkeypatch.setenv("DORMOUSE_CA_BUNDLE", str(authority.certificate))
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.3")
    stack = CloudFormation()
    yield stack
    stack.close()


@pytest.fixture
def event(cloudformation: CloudFormation, server: tuple[str, int], dsn: str) -> dict[str, Any]:
    return migration(cloudformation.url, Port=str(server[1]), Password=PASSWORD, Migrations=NEW)


def updated(event: dict[str, Any], *, migrations: str = NEW, **changes: str) -> dict[str, Any]:
    """Returns the event of an update of the stack.

    Before the update, the properties are those of `event` and the given `migrations`. After it, they are
    those of `event`, replaced by `changes`.
    """
    now = {**event["ResourceProperties"], **changes}
    old = {**event["ResourceProperties"], "Migrations": migrations}
    more = {"ResourceProperties": now, "OldResourceProperties": old, "PhysicalResourceId": PHYSICAL_ID}
    return {**event, "RequestType": "Update", **more}


def schema(dsn: str) -> str | None:
    with psycopg.connect(dsn) as conn:
        return conn.execute("select to_regclass('dormouse.file_reference')::text").fetchall()[0][0]


def test_create_applies_migrations_and_creates_roles(
    event: dict[str, Any], cloudformation: CloudFormation, dsn: str
) -> None:
    handler(event, Context())
    answer = cloudformation.answer
    assert (answer["Status"], answer["PhysicalResourceId"]) == ("SUCCESS", PHYSICAL_ID)
    assert answer["Data"]["Result"].startswith("applied migrations: 0001_tables_partitions_files, 0002")
    assert {name: answer[name] for name in ("StackId", "RequestId", "LogicalResourceId")} == {
        "StackId": "arn:stack",
        "RequestId": "request",
        "LogicalResourceId": "Migration",
    }
    assert schema(dsn) is not None
    with psycopg.connect(make_conninfo(dsn, user="master", password=PASSWORD)) as conn:
        names = [OWNER_ROLE, RUN_ROLE, SCHEMA_ROLE]
        found = conn.execute("select count(*) from pg_roles where rolname = any(%s)", [names])
        assert found.fetchall() == [(3,)]


@pytest.mark.slow
def test_databases_of_row_tables_are_created(event: dict[str, Any], cloudformation: CloudFormation) -> None:
    for more in ({"RowDatabases": "rows_1 rows_2"}, {"Database": "rows_1", "RowsOnly": "true"}):
        handler({**event, "ResourceProperties": event["ResourceProperties"] | more}, Context())
    results = [answer["Data"]["Result"].rpartition("; ")[2] for answer in cloudformation.answers]
    assert results == ["databases of row tables: rows_1, rows_2", "databases of row tables: rows_1"]


@pytest.mark.slow
def test_an_update_keeps_the_id_of_the_resource(
    event: dict[str, Any], cloudformation: CloudFormation
) -> None:
    handler(event, Context())
    handler(updated(event, migrations="c1"), Context())
    assert [answer["Status"] for answer in cloudformation.answers] == ["SUCCESS"] * 2
    assert {answer["PhysicalResourceId"] for answer in cloudformation.answers} == {PHYSICAL_ID}
    assert cloudformation.answers[1]["Data"]["Result"].startswith("applied migrations: none")


@pytest.mark.slow
def test_delete_leaves_the_database_alone(
    event: dict[str, Any], cloudformation: CloudFormation, dsn: str
) -> None:
    handler(event, Context())
    handler({**event, "RequestType": "Delete", "PhysicalResourceId": PHYSICAL_ID}, Context())
    assert [answer["Status"] for answer in cloudformation.answers] == ["SUCCESS"] * 2
    assert schema(dsn) is not None


def test_delete_needs_no_database(event: dict[str, Any], cloudformation: CloudFormation) -> None:
    """The delete must also succeed after a failed creation: CloudFormation deletes the failed resource."""
    del event["ResourceProperties"]["Host"]
    handler({**event, "RequestType": "Delete", "PhysicalResourceId": "of a failure"}, Context())
    assert cloudformation.answer["Status"] == "SUCCESS"
    assert cloudformation.answer["PhysicalResourceId"] == "of a failure"


@pytest.mark.parametrize("password", [PASSWORD, "wrong-and-secret"])
def test_a_failure_is_one_line_without_the_password(
    event: dict[str, Any],
    cloudformation: CloudFormation,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(f"something\nwith the password {password} in it")

    monkeypatch.setattr(migrate, "bring_up_to_date", fail)
    event["ResourceProperties"]["Password"] = password
    with lambda_service(monkeypatch):
        handler(event, Context())
    answer = cloudformation.answer
    assert answer["Status"] == "FAILED" and answer["Reason"] and "\n" not in answer["Reason"]
    captured = capsys.readouterr()
    assert answer["Reason"] in json.loads(captured.out.splitlines()[-1])["message"]
    assert password not in json.dumps(answer) + captured.out + captured.err


@pytest.mark.slow
def test_older_code_is_refused_by_a_newer_database(
    event: dict[str, Any], cloudformation: CloudFormation, dsn: str
) -> None:
    handler(event, Context())
    with psycopg.connect(dsn) as conn:
        conn.execute("insert into dormouse.migration values (999, 'of_tomorrow', 'x')")
    handler(updated(event, migrations="c9"), Context())
    answer = cloudformation.answers[1]
    assert answer["Status"] == "FAILED"
    assert answer["Reason"].startswith("the database has migration 0999_of_tomorrow, this Dormouse knows")
    assert answer["Reason"].endswith("upgrade Dormouse")


def owners(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "objects" / "owner").glob("*"))


@pytest.mark.slow
def test_a_new_database_becomes_the_owner_of_an_empty_store(
    event: dict[str, Any], cloudformation: CloudFormation, dsn: str, tmp_path: Path
) -> None:
    for one in (event, event, updated(event, migrations="c1")):  # the first is delivered twice
        handler(one, Context())
    assert [answer["Status"] for answer in cloudformation.answers] == ["SUCCESS"] * 3
    assert owners(tmp_path) == ["1.json"]
    objects = open_store(tmp_path / "objects")
    with Instance(dsn, objects, load_settings()).open() as instance:
        assert instance.refusal is None


@pytest.mark.slow
def test_a_replacing_database_adopts_the_store_and_a_rollback_returns_it(
    event: dict[str, Any], cloudformation: CloudFormation, server: tuple[str, int], dsn: str, tmp_path: Path
) -> None:
    handler(event, Context())
    with psycopg.connect(server[0], autocommit=True) as conn:
        conn.execute("create database restored template dormouse owner master")
    try:
        there = updated(event, Database="restored")
        handler(there, Context())
        assert "adopted, as incarnation 2" in cloudformation.answers[-1]["Data"]["Result"]
        objects = open_store(tmp_path / "objects")
        for name, refusal in (("restored", None), ("dormouse", InstanceTakenOver)):
            with Instance(make_conninfo(dsn, dbname=name), objects, load_settings()).open() as instance:
                assert (instance.refusal and type(instance.refusal)) == refusal
        back = {"ResourceProperties": there["OldResourceProperties"]}
        handler({**there, **back, "OldResourceProperties": there["ResourceProperties"]}, Context())
        assert "adopted, as incarnation 3" in cloudformation.answers[-1]["Data"]["Result"]
        with Instance(dsn, objects, load_settings()).open() as instance:
            assert instance.refusal is None
    finally:
        with psycopg.connect(server[0], autocommit=True) as conn:
            conn.execute("drop database restored with (force)")


def test_a_restored_snapshot_in_a_new_deployment_adopts_the_kept_store(
    event: dict[str, Any],
    cloudformation: CloudFormation,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new incarnation begins before the migrations. An old announcement of a deletion is ignored."""
    monkeypatch.setattr("dormouse.aws.schedules.migration.OLD_DELETIONS_SECONDS", 0.0)
    handler(event, Context())
    objects = open_store(tmp_path / "objects")
    objects.put("owner/now/deletion-1-ab.json", b'{"host": "169.254.1.1", "pid": 8, "since": "then"}')
    with psycopg.connect(dsn, autocommit=True) as conn:  # as after a restore into another cluster
        conn.execute("update dormouse.incarnation set system_identifier = system_identifier + 1")
        [(next_xid,)] = conn.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::int").fetchall()
        handler(event, Context())
        began = "select added_xid::text::int from dormouse.incarnation where reason = 'adoption'"
        assert next_xid <= conn.execute(began).fetchall()[0][0] < next_xid + 5
    assert "adopted, as incarnation 2" in cloudformation.answers[-1]["Data"]["Result"]
    assert owners(tmp_path) == ["1.json", "2.json"]
    with Instance(dsn, objects, load_settings()).open() as instance:
        assert [one.holder for one in instance.holds()] == ["adoption 2"]


@pytest.mark.slow
def test_an_empty_database_with_the_store_of_another_instance_fails_the_deployment(
    event: dict[str, Any], cloudformation: CloudFormation, tmp_path: Path
) -> None:
    handler(event, Context())
    (tmp_path / "objects" / "instance.json").chmod(0o600)
    (tmp_path / "objects" / "instance.json").write_text('{"instance_id": "0"}')
    handler(updated(event, Host="LOCALHOST"), Context())
    assert cloudformation.answers[-1]["Status"] == "FAILED"
    assert "belongs to instance 0" in cloudformation.answers[-1]["Reason"]


def test_a_server_whose_certificate_has_another_name_is_refused(
    event: dict[str, Any], cloudformation: CloudFormation, dsn: str
) -> None:
    event["ResourceProperties"]["Host"] = "127.0.0.1"
    handler(event, Context())
    assert cloudformation.answer["Status"] == "FAILED"
    assert "certificate" in cloudformation.answer["Reason"]
    assert schema(dsn) is None


def test_a_server_without_a_certificate_of_amazon_is_refused(
    event: dict[str, Any], cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DORMOUSE_CA_BUNDLE")
    handler(event, Context())
    assert "certificate verify failed" in cloudformation.answer["Reason"]


def test_an_answer_that_cloudformation_refuses_is_retried(
    event: dict[str, Any], cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers.time, "sleep", lambda seconds: None)
    cloudformation.refusals = 2
    handler({**event, "RequestType": "Delete", "PhysicalResourceId": PHYSICAL_ID}, Context())
    assert cloudformation.answer["Status"] == "SUCCESS"


@pytest.mark.slow
def test_the_lambda_answers_before_its_time_limit(
    event: dict[str, Any], cloudformation: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS ends a lambda at its time limit, and no other process could answer CloudFormation then."""
    answered = threading.Event()
    give = answers._put
    monkeypatch.setattr(answers, "_put", lambda url, body: (give(url, body), answered.set()))
    monkeypatch.setattr(migrate, "bring_up_to_date", lambda *_: answered.wait(60))
    handler(event, Context(seconds=MARGIN_SECONDS + 0.5))
    assert cloudformation.answer["Reason"] == "it took longer than the lambda may"


def test_a_resource_without_its_properties_is_refused(
    event: dict[str, Any], cloudformation: CloudFormation
) -> None:
    del event["ResourceProperties"]["Host"], event["ResourceProperties"]["User"]
    handler(event, Context())
    assert cloudformation.answer["Reason"] == "the resource has no Host, User"


@pytest.mark.slow
def test_two_concurrent_migrations_both_succeed(
    event: dict[str, Any], cloudformation: CloudFormation
) -> None:
    threads = [threading.Thread(target=handler, args=(event, Context())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer["Status"] for answer in cloudformation.answers] == ["SUCCESS"] * 2


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    found = Aws()
    monkeypatch.setattr(migrate, "open_session", lambda region: found)
    monkeypatch.setenv("DORMOUSE_MIGRATE_FUNCTION", FUNCTION)
    return found


def of_cloudformation(event: dict[str, Any]) -> dict[str, Any]:
    """Returns the event that CloudFormation sends to the first of two lambdas.

    The event has the name of a secret. The second lambda gets the secret's user and password instead.
    """
    properties = {**event["ResourceProperties"], "Secret": SECRET}
    del properties["User"], properties["Password"]
    return {**event, "ResourceProperties": properties}


@pytest.mark.slow
def test_the_login_comes_from_the_secret(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws, dsn: str
) -> None:
    aws.stack_status = "CREATE_IN_PROGRESS"
    aws.give_login(SECRET, PASSWORD)
    begin(of_cloudformation(event), Context())
    assert cloudformation.answers == [], "the other lambda answers"
    handler(*aws.handed, Context())
    assert cloudformation.answer["Status"] == "SUCCESS" and schema(dsn) is not None


def test_a_secret_that_may_not_be_read_fails_the_deployment(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    aws.stack_status = "UPDATE_IN_PROGRESS"
    aws.secrets.add_client_error("get_secret_value", "AccessDeniedException", "no")
    begin(of_cloudformation(event), Context())
    assert cloudformation.answer["Status"] == "FAILED"
    assert "no right to secretsmanager:GetSecretValue" in cloudformation.answer["Reason"]
    assert not aws.handed


def test_a_resource_without_a_secret_is_refused(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    aws.stack_status = "CREATE_IN_PROGRESS"
    begin(event, Context())
    assert cloudformation.answer["Reason"] == "the resource has no Secret"


@pytest.mark.slow
def test_a_rollback_to_older_code_succeeds_and_reports_the_newer_schema(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws, dsn: str
) -> None:
    """A failure would leave the stack in UPDATE_ROLLBACK_FAILED. Older code works with the newer schema."""
    handler(event, Context())
    with psycopg.connect(dsn) as conn:
        conn.execute("insert into dormouse.migration values (999, 'of_tomorrow', 'x')")
    aws.stack_status = "UPDATE_ROLLBACK_IN_PROGRESS"
    aws.give_login(SECRET, PASSWORD)
    begin(of_cloudformation(updated(event, migrations="c9")), Context())
    handler(aws.handed[0], Context())
    answer = cloudformation.answers[1]
    assert answer["Status"] == "SUCCESS"
    left = "rolled back, and the database is left as it is: the database has migration 0999_of_tomorrow,"
    assert answer["Data"]["Result"].startswith(left)


def test_an_error_during_a_rollback_does_not_fail_it(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    aws.stack_status = "UPDATE_ROLLBACK_IN_PROGRESS"
    aws.secrets.add_client_error("get_secret_value", "AccessDeniedException", "no")
    begin(of_cloudformation(event), Context())
    assert cloudformation.answer["Status"] == "SUCCESS"
    assert "no right to secretsmanager:GetSecretValue" in cloudformation.answer["Data"]["Result"]


@pytest.mark.slow
def test_delete_needs_no_secret(event: dict[str, Any], cloudformation: CloudFormation, aws: Aws) -> None:
    gone = {"RequestType": "Delete", "PhysicalResourceId": "of a failure"}
    begin(of_cloudformation(event) | gone, Context())
    assert cloudformation.answer["Status"] == "SUCCESS"
    assert cloudformation.answer["PhysicalResourceId"] == "of a failure"
