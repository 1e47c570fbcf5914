"""The environment of each lambda, typed: stacks write it with `variables`, lambdas read it when called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, Json, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput
from dormouse.settings.process import PREFIX, load

# The fields of what a lambda is called with: each is there and of its kind, or one line names it.

T = TypeVar("T")
_KINDS: dict[type, str] = {
    str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip


def field(event: Any, path: str, kind: type[T], what: str = "the event") -> T:
    """What the event (`what` names it) has at a path such as `run.run_id`, of this kind of JSON.

    Raises `InvalidInput` with the path when nothing is there (or null, or empty), or another kind.
    """
    found, name = event, what
    for part in path.split("."):
        if not isinstance(found, Mapping):
            raise InvalidInput(f"{name} must be an object of JSON, not {_shown(found)}")
        found, name = found.get(part), f"{part!r} of {name}"
        if found is None or found in ("", [], {}):
            raise InvalidInput(f"{what} has no {path!r}")
    if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
        raise InvalidInput(f"{path!r} of {what} must be {_KINDS[kind]}, not {_shown(found)}")
    return found


def _shown(value: Any) -> str:
    names = {type(None): "null", float: "a fraction", **_KINDS}
    return names.get(type(value), type(value).__name__)


# The metrics of the lambdas in CloudWatch: all have one dimension, the instance.

NAMESPACE = "Dormouse"
DIMENSION = "instance"

COMMITS_APPLIED = "CommitsApplied"
COMMITS_REJECTED = "CommitsRejected"
COMMITS_LATER = "CommitsLater"
"""Tries of requests that are delivered again."""

COMMITS_DEAD = "CommitsDead"
"""Messages that name no commit, left to the dead letters."""

FILES_DELETED = "FilesDeleted"
ORPHANED_BYTES = "OrphanedBytes"
"""Of files that nothing refers to, after a round of garbage collection."""

TABLES_TO_SPLIT = "TablesToSplit"
PAYLOAD_BACKLOG_DAYS = "PayloadBacklogDays"
"""Days that are over and whose payloads are not offloaded yet, after a round of maintenance."""

RUN_JOBS_FINISHED = "RunJobsFinished"
RUN_JOBS_RELEASED = "RunJobsReleased"
"""Compaction jobs that a run on Spark was handed and did not finish; their files wait for the next."""

RUN_JOBS_GIVEN_UP = "RunJobsGivenUp"
"""Compaction jobs of a run's tables that failed at every attempt while it ran; their files stay."""

ROUNDS_FAILING = "RoundsFailing"
"""Of all tables, compaction, splits and collections whose last round failed; `dormouse status` names them."""

RUNS_FAILED = "RunsFailed"
"""Runs on Spark that failed or were cancelled."""

RUNNING_WHILE_PAUSED = "RunningWhilePaused"
"""1 when something of a paused instance runs, or AWS does not tell; else 0. It is told every hour."""

Unit = Literal["Count", "Bytes"]
UNITS: dict[str, Unit] = {ORPHANED_BYTES: "Bytes"}
"""Those that are no counts."""


_OF_THE_SERVICE = {"region", "function_name"}
NonEmpty = Annotated[str, Field(min_length=1)]
Engine = Literal["emr-serverless", "emr-ec2-steps", "emr-ec2-transient"]


class Environment(BaseSettings):
    """That of `pause`. Each field is a variable with the prefix `DORMOUSE_`; `load_environment` builds it."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    instance_id: NonEmpty = "local"
    """The id of the instance; metrics have it as their dimension."""

    region: NonEmpty | None = Field(default=None, validation_alias="AWS_REGION")
    """The AWS region, which the lambda service sets."""

    function_name: NonEmpty | None = Field(default=None, validation_alias="AWS_LAMBDA_FUNCTION_NAME")
    """The name of the function, which the lambda service sets; None: this is no lambda."""

    @classmethod
    def variables(cls, **values: Any) -> dict[str, str]:
        """The variables that make this environment, for a stack; InvalidInput names what is missing."""
        if unknown := sorted(values.keys() - (cls.model_fields.keys() - _OF_THE_SERVICE)):
            raise InvalidInput(f"{cls.__name__} has no {', '.join(unknown)}")
        texts = {name: _text(value) for name, value in values.items() if value is not None}
        missing = {name for name, field in cls.model_fields.items() if field.is_required()} - texts.keys()
        if missing:
            raise InvalidInput(f"{cls.__name__} needs {', '.join(sorted(missing))}")
        return {f"{PREFIX}{name.upper()}": text for name, text in texts.items()}


class DatabaseEnvironment(Environment):
    """Of every lambda that works on the database; of `garbage` and `tables`, all of it."""

    dsn: NonEmpty = Field(repr=False)  # it may hold a password
    """The instance's PostgreSQL."""

    objects: NonEmpty
    """The instance's object store: s3://bucket/prefix or file:///path."""

    connect_seconds_max: float = Field(default=30, gt=0)
    """How long a database that starts is waited for."""


class CommitEnvironment(DatabaseEnvironment):
    """Of `commit`."""

    receives_max: int = Field(default=40, ge=1)
    """How often a request is delivered before it is refused because its inputs are not there.

    SQS also counts the deliveries in which it only waited for a database; after 50 it is a dead letter.
    """

    patience_seconds: float = Field(default=10, ge=0, le=60)
    """How long a batch is held for requests whose inputs are not there yet, before SQS hides them again."""


class MaintenanceEnvironment(DatabaseEnvironment):
    """Of `maintenance`."""

    payload_retention_days: int | None = Field(default=None, ge=1)
    """After how many days payloads are dropped; None: never."""

    payloads_hot_seconds: float = Field(default=25_200, ge=0)
    """For how long after their day ended payloads stay in PostgreSQL."""

    jobs_retention_days: int = Field(default=30, ge=1)
    """After how many days jobs that ended are dropped."""


class CompactionEnvironment(DatabaseEnvironment):
    """Of `compaction.create` and `compaction.report`."""

    jobs_max: int = Field(default=20_000, ge=1)
    """How many jobs one run gets at most."""

    run_minutes_max: int = Field(default=360, ge=1)
    """How long a run may take; its jobs are its own for so long."""


class MigrateEnvironment(Environment):
    """Of `migrate`; where the database is, and the login, come with its event."""

    objects: NonEmpty
    """The instance's object store, which a database that is restored adopts."""

    connect_seconds_max: float = Field(default=120, gt=0)
    """How long a database that starts is waited for."""

    ca_bundle: NonEmpty | None = None
    """The certificates that the database's is checked against; None: those of Amazon RDS."""


class BeginMigrationEnvironment(Environment):
    """Of `migrate.begin`, which calls Secrets Manager and `migrate` only."""

    migrate_function: NonEmpty
    """The name of the function that migrates, within the VPC."""


class RunsEnvironment(Environment):
    """Of `runs.submit` and `runs.follow`, which call EMR only."""

    engine: Engine
    """Where Spark runs."""

    dsn: NonEmpty = Field(repr=False)
    """What the run connects to."""

    objects: NonEmpty
    """The instance's object store."""

    archive: NonEmpty
    """The URI of the environment that the run unpacks: s3://…/dormouse-arm64.tgz."""

    entry: NonEmpty
    """The URI of the script that Spark starts."""

    run_minutes_max: int = Field(default=360, ge=1)
    """After how long a run is cancelled."""

    application_id: NonEmpty | None = None
    """The EMR Serverless application."""

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
    """Of `pause.switch`, which calls CloudFormation only."""

    stack: NonEmpty
    """The ARN of the stack that it lets run or sleep, as its right is for."""


E = TypeVar("E", bound=Environment)


def load_environment(model: type[E]) -> E:
    """The environment as it is now; raises InvalidInput that names the bad and missing variables."""
    return load(model, {})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
