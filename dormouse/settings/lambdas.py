"""The typed environment of each lambda.

Stacks write it with `variables`, and each call of a lambda reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, Json, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput
from dormouse.settings.process import PREFIX, load

# The fields of a lambda's event: a missing or mistyped field gives an error of one line.

T = TypeVar("T")
_KINDS: dict[type, str] = {
    str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip


def field(event: Any, path: str, kind: type[T], what: str = "the event") -> T:
    """Returns the value in an event at a path such as `run.run_id`.

    Raises `InvalidInput` with the path if the value is missing, null, empty or not of the type `kind`. The
    message calls the event `what`.
    """
    found, name = event, what
    for part in path.split("."):
        if not isinstance(found, Mapping):
            raise InvalidInput(f"{name} must be an object of JSON, not {_type_name(found)}")
        found, name = found.get(part), f"{part!r} of {name}"
        if found is None or found in ("", [], {}):
            raise InvalidInput(f"{what} has no {path!r}")
    if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
        raise InvalidInput(f"{path!r} of {what} must be {_KINDS[kind]}, not {_type_name(found)}")
    return found


def _type_name(value: Any) -> str:
    names = {type(None): "null", float: "a fraction", **_KINDS}
    return names.get(type(value), type(value).__name__)


# The metrics of the lambdas in CloudWatch. All have one dimension, the instance.

NAMESPACE = "Dormouse"
DIMENSION = "instance"

COMMITS_APPLIED = "CommitsApplied"
COMMITS_REJECTED = "CommitsRejected"
COMMITS_LATER = "CommitsLater"
"""The metric of the number of commit requests that SQS delivers again later."""

COMMITS_DEAD = "CommitsDead"
"""The metric of the number of messages that contain no commit request, and become dead letters."""

FILES_DELETED = "FilesDeleted"
ORPHANED_BYTES = "OrphanedBytes"
"""The metric of the size of the files that nothing refers to, after a round of garbage collection."""

TABLES_TO_SPLIT = "TablesToSplit"
PAYLOAD_BACKLOG_DAYS = "PayloadBacklogDays"
"""The metric of the number of past days whose payloads are not offloaded yet, after a round of
maintenance."""

RUN_JOBS_FINISHED = "RunJobsFinished"
RUN_JOBS_RELEASED = "RunJobsReleased"
"""The metric of the number of compaction jobs that a run on Spark did not finish. Their files wait for the
next run."""

RUN_JOBS_GIVEN_UP = "RunJobsGivenUp"
"""The metric of the number of compaction jobs that were given up during a run on Spark. Their files stay as
they are."""

ROUNDS_FAILING = "RoundsFailing"
"""The metric of the number of compactions, splits and collections of tables whose last round failed.
`dormouse status` lists them."""

RUNS_FAILED = "RunsFailed"
"""The metric of the number of runs on Spark that failed or were cancelled."""

RUNNING_WHILE_PAUSED = "RunningWhilePaused"
"""The metric, sent every hour, that is 1 if a part of a paused instance runs or AWS does not report its
state, else 0."""

Unit = Literal["Count", "Bytes"]
UNITS: dict[str, Unit] = {ORPHANED_BYTES: "Bytes"}
"""The units of the metrics that are not numbers of things."""


_OF_THE_SERVICE = {"region", "function_name"}
NonEmpty = Annotated[str, Field(min_length=1)]
Engine = Literal["emr-serverless", "emr-ec2-steps", "emr-ec2-transient"]


class Environment(BaseSettings):
    """The environment of the lambda `pause`, and the base class of the others. `load_environment` creates it.

    Each field is an environment variable with the prefix `DORMOUSE_`.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    instance_id: NonEmpty = "local"
    """The id of the instance, which is the dimension of its metrics."""

    region: NonEmpty | None = Field(default=None, validation_alias="AWS_REGION")
    """The AWS region, which the lambda service sets."""

    function_name: NonEmpty | None = Field(default=None, validation_alias="AWS_LAMBDA_FUNCTION_NAME")
    """The name of the function, which the lambda service sets; None if this is not a lambda."""

    @classmethod
    def variables(cls, **values: Any) -> dict[str, str]:
        """Returns the environment variables that a stack sets for a lambda with these values.

        Raises `InvalidInput` for an unknown or missing value.
        """
        if unknown := sorted(values.keys() - (cls.model_fields.keys() - _OF_THE_SERVICE)):
            raise InvalidInput(f"{cls.__name__} has no {', '.join(unknown)}")
        texts = {name: _text(value) for name, value in values.items() if value is not None}
        missing = {name for name, field in cls.model_fields.items() if field.is_required()} - texts.keys()
        if missing:
            raise InvalidInput(f"{cls.__name__} needs {', '.join(sorted(missing))}")
        return {f"{PREFIX}{name.upper()}": text for name, text in texts.items()}


class DatabaseEnvironment(Environment):
    """The environment of lambdas that use the database. `garbage` and `tables` have no other variables."""

    dsn: NonEmpty = Field(repr=False)  # it may hold a password
    """The DSN of the instance's PostgreSQL."""

    objects: NonEmpty
    """The instance's object store: s3://bucket/prefix or file:///path."""

    connect_seconds_max: float = Field(default=30, gt=0)
    """The time in seconds that a lambda waits for a database that is starting."""


class CommitEnvironment(DatabaseEnvironment):
    """The environment of `commit`."""

    receives_max: int = Field(default=40, ge=1)
    """The number of deliveries after which a request is refused because its inputs are missing. SQS also
    counts deliveries that only waited for a database; after 50 the message is a dead letter."""

    patience_seconds: float = Field(default=10, ge=0, le=60)
    """The time in seconds that the lambda keeps a batch and waits for missing inputs of requests. After that
    time, SQS hides the requests again."""


class MaintenanceEnvironment(DatabaseEnvironment):
    """The environment of `maintenance`."""

    payload_retention_days: int | None = Field(default=None, ge=1)
    """The number of days after which payloads are dropped; None to keep them."""

    payloads_hot_seconds: float = Field(default=25_200, ge=0)
    """The time in seconds that payloads stay in PostgreSQL after their day ended."""

    jobs_retention_days: int = Field(default=30, ge=1)
    """The number of days after which ended jobs are dropped."""


class CompactionEnvironment(DatabaseEnvironment):
    """The environment of `compaction.create` and `compaction.report`."""

    jobs_max: int = Field(default=20_000, ge=1)
    """The largest number of jobs of one run."""

    run_minutes_max: int = Field(default=360, ge=1)
    """The time in minutes that a run may take. The run owns its jobs for at least this time."""


class MigrateEnvironment(Environment):
    """The environment of `migrate`. Its event contains the address of the database and the login."""

    objects: NonEmpty
    """The instance's object store, which a restored database adopts."""

    connect_seconds_max: float = Field(default=120, gt=0)
    """The time in seconds that the lambda waits for a database that is starting."""

    ca_bundle: NonEmpty | None = None
    """The file of certificates that verify the database; None for the certificates of Amazon RDS."""


class BeginMigrationEnvironment(Environment):
    """The environment of `migrate.begin`, which calls only Secrets Manager and `migrate`."""

    migrate_function: NonEmpty
    """The name of the function that migrates, within the VPC."""


class RunsEnvironment(Environment):
    """The environment of `runs.submit` and `runs.follow`, which call only EMR."""

    engine: Engine
    """The engine that Spark runs on."""

    dsn: NonEmpty = Field(repr=False)
    """The DSN that the run connects to."""

    objects: NonEmpty
    """The instance's object store."""

    archive: NonEmpty
    """The URI of the environment that the run unpacks: s3://…/dormouse-arm64.tgz."""

    entry: NonEmpty
    """The URI of the script that Spark starts."""

    run_minutes_max: int = Field(default=360, ge=1)
    """The time in minutes after which a run is cancelled."""

    application_id: NonEmpty | None = None
    """The id of the EMR Serverless application."""

    execution_role: NonEmpty | None = None
    """The ARN of the role of the runs on EMR Serverless."""

    worker_vcpu: int = Field(default=4, ge=1)
    """The virtual CPUs of each executor."""

    log_group: NonEmpty | None = None
    """The log group of the runs on EMR Serverless."""

    cluster_name: NonEmpty | None = None
    """The name of the clusters of EMR on EC2."""

    cluster_template: Json[dict[str, Any]] | None = None
    """The request of RunJobFlow without Name and Steps, as JSON."""

    @model_validator(mode="after")
    def _has_what_its_engine_needs(self) -> Self:
        needed = (
            {"application_id": self.application_id, "execution_role": self.execution_role}
            if self.engine == "emr-serverless"
            else {"cluster_name": self.cluster_name, "cluster_template": self.cluster_template}
        )
        if missing := [f"{PREFIX}{name.upper()}" for name, value in needed.items() if value is None]:
            raise ValueError(f"the engine {self.engine} also needs {' and '.join(missing)}")
        return self


class SwitchEnvironment(Environment):
    """The environment of `pause.switch`, which calls only CloudFormation."""

    stack: NonEmpty
    """The ARN of the stack that the lambda wakes or puts to sleep. It has rights to no other stack."""


E = TypeVar("E", bound=Environment)


def load_environment(model: type[E]) -> E:
    """Returns the settings in the environment variables.

    Raises `InvalidInput`, which names wrong and missing ones.
    """
    return load(model, {})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
