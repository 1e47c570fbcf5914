"""The custom resource of CloudFormation that migrates the database as part of a deployment.

The properties of the resource:

- Host, Port, Database, and Secret (of the master user)
- Migrations: a checksum, so that the resource changes with the migrations
- DeployPaused: "true" if the first deploy leaves the instance paused
- RowDatabases: the databases for indexes of row tables, separated by blanks
- RowsOnly: set for a cluster that only has such indexes

CloudFormation resolves no secrets for custom resources, and the VPC has no route to Secrets Manager. So the
lambda `begin`, outside the VPC, adds User and Password and passes the event to the lambda `handler`. `begin`
also creates the desired state, and answers by itself when there is nothing to migrate. Every event gets an
answer, with the reason in one line when it fails. The event contains the password, so it is never logged.

During a rollback, older code may meet a newer schema, and can work with it. So no failure is reported then:
it would leave the stack in UPDATE_ROLLBACK_FAILED. `begin` reads the state of the stack, and passes it to
`handler` as RollsBack.

The first database of a deployment becomes the owner of the object store. So does a database that replaces
another: one from a snapshot, or the former one when CloudFormation rolls back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from psycopg.conninfo import make_conninfo

from dormouse.aws.aws import Aws, open_session
from dormouse.aws.schedules.migration import bring_up_to_date, make_row_databases, own
from dormouse.errors import DormouseError, InstanceError, InvalidInput
from dormouse.objects import open_store
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.session import SESSION_SETTINGS, LoginRefused, by_token
from dormouse.settings.lambdas import BeginMigrationEnvironment, MigrateEnvironment, field
from dormouse.settings.resources import state_parameter
from dormouse.settings.section import CA_BUNDLE, CONNECT_SECONDS_MAX
from dormouse.state.commits.outcomes import text_of
from lambdas.answers import Answer, is_rolled_back, properties_before, request_type
from lambdas.database import connected
from lambdas.services import Call, called, tracer, wakeable

PHYSICAL_ID = "dormouse-migrations"
"""The constant id of the resource. If the id changed, CloudFormation would delete the resource with the old
id."""

APPLICATION_NAME = "dormouse-migrate"
ROLLS_BACK = "RollsBack"
LEFT_ALONE = "the database is left as it is"
_WHERE = ("Host", "Port", "Database")

logger = logging.getLogger("dormouse.lambdas")


@tracer.capture_lambda_handler(capture_response=False, capture_error=False)
def begin(event: dict[str, Any], context: Any) -> None:
    """Creates the desired state, adds the login of the master user, and passes the event to `handler`."""
    answer = Answer(event, PHYSICAL_ID)
    try:
        with called(BeginMigrationEnvironment, "migrate", context) as call:
            name = state_parameter(call.environment.instance_id)
            if request_type(event) == "Delete":
                _forget(event, call.environment, name)
                answer.succeeded(LEFT_ALONE)  # CloudFormation may have deleted the secret
                return
            secret, aws = _secret_of(event), Aws(open_session(call.environment.region))
            answer.rolls_back = rolls_back = is_rolled_back(aws, event["StackId"])
            there = aws.parameter(name)
            wanted = _wanted(event, there, rolls_back=rolls_back)
            result = _without_database(event, there, wanted, rolls_back=rolls_back)
            if wanted is not None and wanted != there:  # only now: a refused update leaves the state as it is
                _write(aws, name, wanted, anew=there is None)
            if result is not None:
                answer.succeeded(result)
            else:
                _hand_over(aws, event, secret, call.environment, rolls_back=rolls_back)
    except Exception as error:
        answer.failed(text_of(error))


@tracer.capture_lambda_handler(capture_response=False, capture_error=False)
@wakeable
def handler(event: dict[str, Any], context: Any) -> None:
    """Migrates the database on Create and Update. Delete leaves the database as it is."""
    answer = Answer(event, PHYSICAL_ID)
    answer.rolls_back = bool(event.get(ROLLS_BACK))
    watch: threading.Timer | None = None
    try:
        with called(MigrateEnvironment, "migrate", context) as call:
            if (left := call.seconds_left()) < threading.TIMEOUT_MAX:
                watch = threading.Timer(left, answer.failed, ["it took longer than the lambda may"])
                watch.daemon = True
                watch.start()
            answer.succeeded(_migrate(event, call))
    except Exception as error:  # any error: without an answer the deployment would wait for an hour
        answer.failed(text_of(error))
    finally:
        if watch is not None:
            watch.cancel()


def _secret_of(event: Mapping[str, Any]) -> str:
    properties = field(event, "ResourceProperties", dict)
    if not properties.get("Secret"):
        raise InvalidInput("the resource has no Secret")
    return str(properties["Secret"])


def _forget(event: Mapping[str, Any], environment: BeginMigrationEnvironment, state: str) -> None:
    """Deletes the desired state of a deleted instance.

    A failure is only logged, so that the stack can be deleted.
    """
    if field(event, "ResourceProperties", dict).get("RowsOnly"):
        return  # the instance is still there
    try:
        Aws(open_session(environment.region)).look("ssm", "delete_parameter", Name=state)
    except DormouseError as error:
        logger.warning("%s stays: %s", state, error)


def _wanted(event: Mapping[str, Any], there: str | None, *, rolls_back: bool) -> str | None:
    """Returns the desired state to write: the current one, unless it is missing or the settings changed it.

    A rollback keeps the current state, because a person may have resumed or paused the instance meanwhile.
    """
    if event["ResourceProperties"].get("RowsOnly"):
        return there
    wanted = event["ResourceProperties"].get("DeployPaused")
    is_changed = properties_before(event).get("DeployPaused", wanted) != wanted and not rolls_back
    if there is not None and not is_changed:
        return there
    return "paused" if wanted == "true" else "running"


def _without_database(
    event: Mapping[str, Any], there: str | None, wanted: str | None, *, rolls_back: bool
) -> str | None:
    """Returns a result if the deploy needs no awake database; None if it needs one.

    A database that replaces another is needed. Raises `InstanceError` if there are migrations but the
    instance is paused or is to be paused.
    """
    new, old = event["ResourceProperties"], properties_before(event)
    if not old or any(new.get(name) != old.get(name) for name in _WHERE):
        return None
    if all(new.get(name) == old.get(name) for name in ("Migrations", "RowDatabases")):
        return "nothing to migrate"
    if there == "paused" and rolls_back:
        return "the instance is paused, and its database as it was before"
    if there == "paused":
        raise InstanceError(
            "the instance is paused, but there are migrations: resume it, deploy, and pause it again"
        )
    if wanted == "paused":
        raise InstanceError(
            "deploy_paused has changed, but there are migrations: deploy them first, and it by itself"
        )
    return None


def _write(aws: Aws, name: str, state: str, *, anew: bool) -> None:
    there = frozenset({"ParameterAlreadyExists"})
    aws.ask("ssm", "put_parameter", refusals=there, Name=name, Type="String", Value=state, Overwrite=not anew)


def _hand_over(
    aws: Aws,
    event: Mapping[str, Any],
    secret: str,
    environment: BeginMigrationEnvironment,
    *,
    rolls_back: bool,
) -> None:
    login = json.loads(aws.call("secretsmanager", "get_secret_value", SecretId=secret)["SecretString"])
    user, password = (field(login, name, str, "the secret") for name in ("username", "password"))
    whole = {**event["ResourceProperties"], "User": user, "Password": password}
    aws.queue(environment.migrate_function, {**event, "ResourceProperties": whole, ROLLS_BACK: rolls_back})


def _migrate(event: Mapping[str, Any], call: Call[MigrateEnvironment]) -> str:
    if request_type(event) == "Delete":
        return LEFT_ALONE
    properties, old = field(event, "ResourceProperties", dict), properties_before(event)
    dsn = _dsn(properties, call.environment)
    connecting = partial(_connected, call.environment)
    if properties.get("RowsOnly"):
        return make_row_databases(dsn, [field(properties, "Database", str)], connecting)
    report = bring_up_to_date(dsn, connecting)
    lines = [str(report)]
    if names := str(properties.get("RowDatabases") or "").split():
        lines.append(make_row_databases(dsn, names, connecting))
    moved = any(properties.get(name) != old.get(name) for name in _WHERE)
    if moved:  # also in a rollback, which brings back the former database
        objects, began = open_store(call.environment.objects), report.began_xid
        adopted = own(dsn, objects, replaces=bool(old), connecting=connecting, began_xid=began)
        lines += [] if adopted is None else [f"the object store is adopted, as incarnation {adopted}"]
    logger.info("%s", "; ".join(lines))
    return "; ".join(lines)


def _dsn(properties: Mapping[str, Any], environment: MigrateEnvironment) -> str:
    if missing := [name for name in (*_WHERE, "User", "Password") if not properties.get(name)]:
        raise InvalidInput(f"the resource has no {', '.join(missing)}")
    return make_conninfo(
        "",
        host=properties["Host"],
        port=properties["Port"],
        dbname=properties["Database"],
        user=properties["User"],
        password=properties["Password"],
        sslmode="verify-full",
        sslrootcert=environment.ca_bundle or str(CA_BUNDLE),
        connect_timeout=CONNECT_SECONDS_MAX,
    )


def _connected(
    environment: MigrateEnvironment, dsn: str, search_path: str = SESSION_SETTINGS["search_path"]
) -> ConnectionSupplier:
    """Returns connections with the master user's password, or with an IAM token if RDS refuses the password.

    RDS refuses the passwords of members of `rds_iam`. PostgreSQL makes the creator of a role a member of that
    role, so the master user can become one.
    """
    seconds = environment.connect_seconds_max
    try:
        return connected(dsn, APPLICATION_NAME, seconds, final=(LoginRefused,), search_path=search_path)
    except LoginRefused as refused:
        if environment.region is None:
            raise
        try:
            token = by_token(dsn, environment.region)
            return connected(token, APPLICATION_NAME, seconds, search_path=search_path)
        except LoginRefused:
            raise InstanceError(f"{refused}; nor is a token of IAM taken of it") from None
