"""`dormouse table … --instance ID`: the command calls lambdas, which answer from a real database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from moto import mock_aws
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.cli import command
from dormouse.errors import InstanceError
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.settings.resources import TablesResources, resources_parameter, state_parameter
from lambdas import tables
from tests.aws_lambda import Context, waking_server
from tests.deployed import REGION, Deployed, deploy
from tests.support.aws import Aws, bring_up_to_date

Cli = Callable[..., tuple[int, str, str]]
CREATE = (
    *("table", "create", "flights", "--row-key", "carrier:string", "--sort-key", "time:long"),
    *("--value", "delay:long?", "--split-point", "DL", "--property", "gc_delay_seconds=0"),
)
CREATE_T = {"do": "create", "table": "t", "schema": {"row_keys": [{"name": "a", "type": "long"}]}}
TABLES = TablesResources(show="dev-show", change="dev-change")


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        name = resources_parameter("dev", "tables")
        found.client("ssm").put_parameter(Name=name, Value=TABLES.model_dump_json(), Type="String")
        yield found


@pytest.fixture
def variables(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment of the lambdas."""
    given = {"dsn": dsn, "objects": (tmp_path / "objects").as_uri()}
    for name, value in DatabaseEnvironment.variables(**given).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def calls(deployed: Deployed, variables: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Returns a list that gets (function, event) of each later call of a lambda.

    The handlers run in this process; their events and answers are passed as JSON.
    """
    made: list[tuple[str, Any]] = []
    handlers = {TABLES.show: tables.show, TABLES.change: tables.change}

    def invoke(aws: Aws, function: str, event: Any, *, seconds_max: float) -> Any:
        made.append((function, json.loads(json.dumps(event))))
        return json.loads(json.dumps(handlers[function](made[-1][1], Context())))

    monkeypatch.setattr(Aws, "invoke", invoke)
    return made


@pytest.fixture
def there(cli: Cli, calls: Any) -> Cli:
    """Returns a function that runs a command on the deployed instance, through lambdas."""
    return lambda *args: cli(*args, "--instance", "dev", "--region", REGION)


@pytest.fixture
def here(cli: Cli, dsn: str, tmp_path: Path) -> Cli:
    """Returns a function that runs a command on the same database directly."""
    return lambda *args: cli(*args, "--dsn", dsn, "--objects", (tmp_path / "objects").as_uri())


@pytest.mark.slow
def test_a_deployed_instance_answers_like_a_direct_connection(there: Cli, here: Cli, calls: Any) -> None:
    """Compares the output as text and as JSON, the exit codes and the errors of both ways."""
    assert there(*CREATE) == (0, "created table flights with 2 partitions\n", "")
    assert [function for function, _ in calls] == [TABLES.change]
    assert there("table", "add-column", "flights", "gate:string?")[0] == 0
    for args in (
        *(
            (*("table", verb, "flights"), *more)
            for verb in ("show", "describe")
            for more in ((), ("--json",))
        ),
        ("table", "list"),
        ("table", "list", "--json"),
        ("table", "show", "nobody"),
        ("table", "set", "nobody", "compression=none"),
        ("table", "set", "flights", "compression=none", "gc_delay_seconds=60"),
        ("table", "set", "flights", "compression=", "--json"),
        ("table", "set", "flights", "colour=red"),
        ("table", "set", "flights", "gc_delay_seconds=-1"),
        ("table", "set", "flights", "aggregate=sum(nothing)"),
        ("table", "convert-layout", "flights", "salted_counts", "--dry-run"),
        ("table", "convert-layout", "flights", "odd"),
        ("table", "add-column", "flights", "gate:string?"),
        ("table", "add-column", "flights", "delay:long?"),
        ("table", "widen-column", "flights", "delay", "string"),
        ("table", "rename-column", "flights", "nothing", "gate"),
        ("table", "drop-column", "flights", "gate", "--dry-run"),
        ("table", "drop-column", "flights", "carrier", "--yes"),
        ("table", "drop", "nobody", "--yes"),
        ("table", "drop", "flights", "--dry-run"),
        ("table", "drop", "flights", "--dry-run", "--json"),
        ("table", "drop", "flights"),
        ("table", "rename", "flights", "../x"),
        CREATE,
        ("table", "create", "t", "--row-key", "a:long", "--split-point", "x"),
        ("table", "create", "t", "--row-key", "a:long", "--layout", "odd"),
    ):
        outcome = there(*args)
        assert outcome == here(*args), args
        assert outcome[2].count("\n") <= 1
    assert "carrier ≥ 'DL'  0 rows" in there("table", "show", "flights")[1]
    assert here("table", "list", "--json")[1] == '["flights"]\n'


def test_a_table_is_changed_and_dropped(there: Cli, here: Cli, dsn: str, tmp_path: Path) -> None:
    """The drop deletes the files too, and only with `--yes`."""
    assert json.loads(there(*CREATE, "--json")[1])["leaves"] == 2
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        instance.table("flights").ingest(pa.table({"carrier": ["AA"], "time": [1], "delay": [2]}))
    code, out, err = there("table", "drop", "flights")
    assert (code, out) == (2, "") and "--yes is needed to drop table flights: 1 row in 1 file" in err
    assert there("table", "rename", "flights", "f")[1] == "table flights is now f\n"
    assert there("table", "convert-layout", "f", "salted_counts")[0] == 0
    assert "layout salted_counts" in here("table", "describe", "f")[1]
    assert there("table", "drop", "f", "--yes")[1] == "dropped table f: 1 row in 1 file\n"
    assert there("table", "list")[1] == "there are no tables yet\n"
    assert not [*(tmp_path / "objects").rglob("*.parquet")]


@pytest.mark.slow
def test_a_drop_needs_agreement_on_a_terminal(
    there: Cli, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there(*CREATE)
    answers = iter([False, True])
    monkeypatch.setattr(command, "agreed", lambda doing, question: next(answers))
    assert there("table", "drop", "flights")[::2] == (2, "dormouse: nothing was dropped\n")
    assert there("table", "list")[1] == "flights\n"
    assert there("table", "drop", "flights")[0] == 0
    dropping = [event.get("dry_run", False) for _, event in calls if event["do"] == "drop"]
    assert dropping == [True, True, False]


def test_commands_on_a_paused_instance_are_refused(deployed: Deployed, there: Cli, calls: Any) -> None:
    name = state_parameter("dev")
    deployed.client("ssm").put_parameter(Name=name, Value="paused", Type="String", Overwrite=True)
    code, out, err = there("table", "list")
    assert (code, out, calls) == (1, "", [])
    assert err == "dormouse: dev is paused, so its database is stopped: run dormouse resume --instance dev\n"


def test_an_instance_without_these_lambdas_must_be_deployed_again(deployed: Deployed, there: Cli) -> None:
    deployed.client("ssm").delete_parameter(Name=resources_parameter("dev", "tables"))
    assert "dev has no lambdas for its tables: deploy it" in there("table", "list")[2]


@pytest.mark.parametrize("verb", ["list", "drop"])
def test_a_change_without_an_answer_is_reported_as_unknown(
    verb: str, there: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(aws: Aws, function: str, event: Any, *, seconds_max: float) -> Any:
        raise InstanceError("AWS cannot be reached")

    there(*CREATE)
    monkeypatch.setattr(Aws, "invoke", lost)
    args = ("table", "drop", "flights", "--yes") if verb == "drop" else ("table", "list")
    code, _, err = there(*args)
    assert code == 1
    assert ("whether the change was made: look with dormouse table list --instance dev" in err) == (
        verb == "drop"
    )


def test_a_name_is_a_folder_where_there_are_no_credentials(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is the id of a deployed instance if there are credentials. So a mistyped id makes no folder."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    create = ("table", "create", "t", "--row-key", "a:nothing", "--instance", "lake")
    assert "unknown type" in cli(*create)[2]
    made: list[Any] = []
    monkeypatch.setattr(command.Session, "open", lambda *given, **more: made.append(more) or 1 / 0)
    create = ("table", "create", "t", "--row-key", "a:long", "--instance", "lake")
    assert "there are no AWS credentials, so lake is taken as the name of a new folder" in cli(*create)[2]
    assert [one["create"] for one in made] == [True]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    refused = cli(*create)[2]
    assert "there is no folder lake, and it cannot be used as a deployed instance: no AWS region" in refused
    assert "to create a folder, give --instance ./lake" in refused and refused.count("\n") == 1
    (tmp_path / "lake").mkdir()
    cli(*create)
    assert len(made) == 2


# --- the lambdas themselves


def error_of(answer: Any) -> str:
    assert answer.keys() == {"error"}
    message = str(answer["error"]["message"])
    assert "\n" not in message
    return message


def test_each_lambda_accepts_only_its_own_commands(variables: None) -> None:
    assert "'do' of the event must be one of describe, list, show, not 'drop'" in error_of(
        tables.show({"do": "drop", "table": "t"}, Context())
    )
    assert "not 'list'" in error_of(tables.change({"do": "list"}, Context()))


@pytest.mark.parametrize(
    ("event", "named"),
    [
        *((one, "the event must be an object of JSON") for one in (None, [], "", "list", 5, 1.5, True)),
        ({}, "the event has no 'do'"),
        ({"do": 5}, "'do' of the event must be text, not a whole number"),
        ({"do": "truncate"}, "'do' of the event must be one of"),
        ({"do": "create"}, "the event has no 'table'"),
        ({"do": "create", "table": ["t"]}, "'table' of the event must be text, not a list"),
        ({"do": "create", "table": "t"}, "the event has no 'schema'"),
        ({"do": "create", "table": "t", "schema": "a"}, "'schema' of the event must be an object, not text"),
        ({"do": "create", "table": "t", "schema": {"keys": 1}}, "unknown schema part 'keys'"),
        (CREATE_T | {"split_points": "DL"}, "'split_points' of the event must be a list, not text"),
        (CREATE_T | {"split_points": [None]}, "split point"),
        (CREATE_T | {"split_points": [{}, []]}, "split point"),
        (CREATE_T | {"layout": 1}, "'layout' of the event must be text"),
        (CREATE_T | {"layout": "odd"}, "odd"),
        (CREATE_T | {"properties": ["a=1"]}, "'properties' of the event must be an object, not a list"),
        (CREATE_T | {"properties": {"self": 1}}, "'self' is not a table property"),
        (CREATE_T | {"properties": {"gc_batch_files": {"a": 1}}}, "gc_batch_files must be a whole number"),
        (CREATE_T | {"properties": {"gc_delay_seconds": None}}, "gc_delay_seconds must be a number"),
        (CREATE_T | {"table": "../x\n\0"}, "x"),
        ({"do": "set", "table": "t"}, "the event has no 'properties'"),
        ({"do": "set", "table": "t", "properties": {"self": 1}}, "'self' is not a table property"),
        ({"do": "set", "table": "t\0", "properties": {"commit": "sync"}}, "does not exist"),
        ({"do": "drop"}, "the event has no 'table'"),
        ({"do": "drop", "table": "t", "dry_run": "no"}, "'dry_run' of the event must be true or false"),
        ({"do": "rename", "table": "t"}, "the event has no 'new_name'"),
        ({"do": "convert-layout", "table": "t"}, "the event has no 'layout'"),
        ({"do": "convert-layout", "table": "t", "layout": "odd"}, "odd"),
    ],
)
def test_a_malformed_event_is_one_line_that_names_the_fault(event: Any, named: str, variables: None) -> None:
    assert named in error_of(tables.change(event, Context()))


@pytest.mark.slow
def test_show_needs_only_the_read_role(dsn: str, variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.change(CREATE_T, Context())
    bring_up_to_date(dsn)
    monkeypatch.setenv("DORMOUSE_DSN", make_conninfo(dsn, user="dormouse_read"))
    assert tables.show({"do": "list"}, Context()) == {"answer": ["t"]}
    for drawn in (True, False):
        found = tables.show({"do": "show", "table": "t", "drawn": drawn}, Context())["answer"]
        assert (found["name"], found["leaves"]) == ("t", 1)
    message = error_of(tables.change({"do": "drop", "table": "t"}, Context()))
    assert "permission denied" in message or "cannot" in message, message
    monkeypatch.setenv("DORMOUSE_DSN", make_conninfo(dsn, user="dormouse_owner"))
    assert tables.change({"do": "drop", "table": "t"}, Context())["answer"]["dropped"]


@pytest.mark.slow
def test_a_lambda_waits_for_a_database_that_starts(
    dsn: str, variables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database first refuses connections, then accepts them and answers late."""
    given = conninfo_to_dict(dsn)
    path = f"{given['host']}/.s.PGSQL.{given.get('port') or 5432}"
    with waking_server(path, 0.5) as port:
        monkeypatch.setenv("DORMOUSE_DSN", make_conninfo(dsn, host="127.0.0.1", port=port))
        made = tables.change(CREATE_T, Context())
    assert made.get("answer", {}).get("name") == "t", made


def test_an_unreachable_database_is_reported(variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("DORMOUSE_CONNECT_SECONDS_MAX", "0.3")
    assert "cannot connect to PostgreSQL" in error_of(tables.show({"do": "list"}, Context()))


def test_an_answer_too_long_for_a_lambda_is_refused(variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"row_keys": [{"name": "a", "type": "long"}]}
    tables.change(CREATE_T | {"table": "t" * 20, "schema": schema}, Context())
    monkeypatch.setattr(tables, "ANSWER_BYTES_MAX", 10)
    assert "use table show without --json, or describe" in error_of(tables.show({"do": "list"}, Context()))
