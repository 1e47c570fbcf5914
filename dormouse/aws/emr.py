"""Submits runs to Spark on EMR, each once; follows and cancels them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from dormouse.aws import emr_clusters
from dormouse.aws.aws import Aws
from dormouse.aws.spark_submit import Run, RunState, application_arguments, serverless_parameters
from dormouse.errors import InvalidInput
from dormouse.settings.lambdas import Engine, RunsEnvironment, field

SERVERLESS = "emr-serverless"
ENGINES = get_args(Engine)
_ENDED: dict[str, RunState] = {"SUCCESS": "SUCCEEDED", "FAILED": "FAILED", "CANCELLED": "CANCELLED"}
_REFUSED_AS_ENDED = frozenset({"ValidationException"})


@dataclass(frozen=True, slots=True)
class Followed:
    """How a run stands, and why, in the words of AWS."""

    state: RunState
    reason: str | None = None


def submit(environment: RunsEnvironment, run: Run, aws: Aws) -> dict[str, str]:
    """Starts a run on the environment's engine, unless it was started already.

    Gives what `follow` and `cancel` need: {"engine", "run_id"} and, on EMR Serverless, {"application", "id"};
    on EC2, {"cluster", "id"} of the step.
    """
    submitted = {"engine": environment.engine, "run_id": run.run_id}
    if environment.engine == SERVERLESS:
        return submitted | _submit_serverless(environment, run, aws)
    cluster, step = emr_clusters.submit(environment, run, run_name(environment, run), aws)
    return submitted | {"cluster": cluster, "id": step}


def follow(event: Mapping[str, Any], aws: Aws) -> Followed:
    """How a run stands, by what `submit` gave; `InvalidInput` names what is missing."""
    submitted = _submitted(event)
    if submitted["engine"] != SERVERLESS:
        return Followed(*emr_clusters.follow(submitted["cluster"], submitted["id"], aws))
    found = aws.call(
        "emr-serverless",
        "get_job_run",
        applicationId=submitted["application"],
        jobRunId=submitted["id"],
    )["jobRun"]
    details = " ".join((found.get("stateDetails") or "").split())
    return Followed(_ENDED.get(found["state"], "RUNNING"), details or None)


def cancel(event: Mapping[str, Any], aws: Aws) -> None:
    """Asks for the end of a run; nothing to do when it is over. `follow` tells when it has ended.

    Takes and raises what `follow` does.
    """
    submitted = _submitted(event)
    if submitted["engine"] != SERVERLESS:
        emr_clusters.cancel(submitted["engine"], submitted["cluster"], submitted["id"], aws)
        return
    aws.ask(
        "emr-serverless",
        "cancel_job_run",
        refusals=_REFUSED_AS_ENDED,
        applicationId=submitted["application"],
        jobRunId=submitted["id"],
    )


def _submitted(event: Mapping[str, Any]) -> dict[str, str]:
    engine = field(event, "engine", str)
    if engine not in ENGINES:
        raise InvalidInput(f"'engine' of the event must be one of {', '.join(ENGINES)}, not {engine}")
    names = ("application", "id") if engine == SERVERLESS else ("cluster", "id")
    return {"engine": engine, **{name: field(event, name, str) for name in names}}


def run_name(environment: RunsEnvironment, run: Run) -> str:
    """What people see in the console: dev-compaction-<run id>."""
    return f"{environment.instance_id}-{run.kind}-{run.run_id}"


def _submit_serverless(environment: RunsEnvironment, run: Run, aws: Aws) -> dict[str, str]:
    """The run id is the client token: EMR answers with the same job run when it is asked again."""
    request: dict[str, Any] = {
        "applicationId": environment.application_id,
        "clientToken": run.run_id,
        "executionRoleArn": environment.execution_role,
        "name": run_name(environment, run),
        "executionTimeoutMinutes": environment.run_minutes_max,
        "jobDriver": {
            "sparkSubmit": {
                "entryPoint": environment.entry,
                "entryPointArguments": application_arguments(environment, run.list),
                "sparkSubmitParameters": " ".join(serverless_parameters(environment, run.jobs)),
            }
        },
    }
    if environment.log_group is not None:
        logging = {
            "enabled": True,
            "logGroupName": environment.log_group,
            "logStreamNamePrefix": run.run_id,
        }
        request["configurationOverrides"] = {
            "monitoringConfiguration": {"cloudWatchLoggingConfiguration": logging}
        }
    started = aws.call("emr-serverless", "start_job_run", **request)
    return {"application": started["applicationId"], "id": started["jobRunId"]}
