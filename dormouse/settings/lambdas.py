"""The environment of each lambda, typed: stacks write it with `variables`, lambdas read it when called."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, Json, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput
from dormouse.settings.process import PREFIX, load

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
