"""Runs on EMR on EC2: as steps of a cluster that is shared, or on a cluster of their own.

EMR has no tokens that make these requests idempotent. So a run is looked for by its name before it is
submitted, and again after: of two that were submitted at once the earlier one stays, and the submitter of the
other ends it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.aws.spark_submit import Run, RunState, step_arguments
from dormouse.errors import InstanceError
from dormouse.model.loops import tries
from dormouse.settings.lambdas import RunsEnvironment

logger = logging.getLogger(__name__)

TRANSIENT = "emr-ec2-transient"
USABLE = ("STARTING", "BOOTSTRAPPING", "RUNNING", "WAITING")
ENDED = ("TERMINATING", "TERMINATED", "TERMINATED_WITH_ERRORS")
FOUND_WITHIN = timedelta(hours=6)
"""How long ago a cluster that has ended was made, when it may have been a run's that is submitted again."""

TRIES_MAX = 3
_SHUTTING_DOWN = frozenset({"InvalidRequestException", "ValidationException"})
_ORDINARY_ENDS = {None, "", "USER_REQUEST", "ALL_STEPS_COMPLETED"}
_LATEST = datetime.max.replace(tzinfo=UTC)


def submit(environment: RunsEnvironment, run: Run, name: str, aws: Aws) -> tuple[str, str]:
    """The ids of the run's cluster and step; the step has the name."""
    step = {
        "Name": name,
        "ActionOnFailure": "TERMINATE_CLUSTER" if environment.engine == TRANSIENT else "CONTINUE",
        "HadoopJarStep": {
            "Jar": "command-runner.jar",
            "Args": step_arguments(environment, run.list, run.jobs),
        },
    }
    if environment.engine == TRANSIENT:
        return _submit_alone(environment, run.run_id, step, aws)
    return _submit_step(environment, step, aws)


def follow(cluster: str, step: str, aws: Aws) -> tuple[RunState, str | None]:
    found = aws.call("emr", "describe_step", ClusterId=cluster, StepId=step)["Step"]
    status = found["Status"]
    match status["State"]:
        case "COMPLETED":
            return "SUCCEEDED", None
        case "FAILED" | "INTERRUPTED":
            return "FAILED", _why(status) or _cluster_trouble(cluster, aws)
        case "CANCELLED":
            # the steps of a cluster that could not start are cancelled as well
            trouble = _cluster_trouble(cluster, aws)
            return ("FAILED", trouble) if trouble else ("CANCELLED", _why(status))
    return "RUNNING", None


def cancel(engine: str, cluster: str, step: str, aws: Aws) -> None:
    """Ends a run with its cluster: a step that is cancelled leaves its driver, which is YARN's, at work.

    Other runs on the cluster end, too, and what they had to do is in the next ones. A step that still waits
    for others has no driver, and goes alone.
    """
    if engine != TRANSIENT and _waits(cluster, step, aws):
        _cancel_step(cluster, step, aws)
        return
    aws.ask("emr", "terminate_job_flows", refusals=_SHUTTING_DOWN, JobFlowIds=[cluster])


def own_cluster_name(environment: RunsEnvironment, run_id: str) -> str:
    """The name of a cluster that is made for one run."""
    return f"{environment.cluster_name}-{run_id}"


def _submit_alone(
    environment: RunsEnvironment, run_id: str, step: dict[str, Any], aws: Aws
) -> tuple[str, str]:
    name = own_cluster_name(environment, run_id)
    cluster = _first(_clusters_of_late(name, aws)) or _start(environment, name, [step], aws)
    step_id = _earliest_step(cluster, step["Name"], aws)
    if step_id is None:
        raise InstanceError(f"the EMR cluster {cluster} ({name}) has no step {step['Name']}")
    return cluster, step_id


def _submit_step(environment: RunsEnvironment, step: dict[str, Any], aws: Aws) -> tuple[str, str]:
    name = str(environment.cluster_name)
    for one in _clusters_of_late(name, aws):
        if found := _earliest_step(one["Id"], step["Name"], aws):
            return one["Id"], found
    for _ in tries(tries_max=TRIES_MAX, pause=0):
        cluster = _first(_clusters(name, aws)) or _start(environment, name, [], aws)
        try:
            [added] = aws.call("emr", "add_job_flow_steps", JobFlowId=cluster, Steps=[step])["StepIds"]
        except AwsRefused as refused:
            # it began to end, as it was idle, since it was listed
            if refused.code not in _SHUTTING_DOWN:
                raise
            failure = refused
            logger.info("cluster %s takes no step any more: %s", cluster, refused)
            continue
        return cluster, _settle_step(cluster, added, step["Name"], aws)
    raise failure


def _start(environment: RunsEnvironment, name: str, steps: list[dict[str, Any]], aws: Aws) -> str:
    """Makes a cluster; when another made one of the same name at once, the earlier one is taken."""
    template = environment.cluster_template or {}
    instances = {
        **template.get("Instances", {}),
        "KeepJobFlowAliveWhenNoSteps": environment.engine != TRANSIENT,
    }
    request = {**template, "Name": name, "Instances": instances, "Steps": steps}
    made = str(aws.call("emr", "run_job_flow", **request)["JobFlowId"])
    kept = _first(_clusters(name, aws)) or made
    if kept != made:
        logger.warning("cluster %s was made beside %s, and is ended", made, kept)
        aws.call("emr", "terminate_job_flows", JobFlowIds=[made])
    return kept


def _settle_step(cluster: str, added: str, name: str, aws: Aws) -> str:
    kept = _earliest_step(cluster, name, aws) or added
    if kept != added:
        logger.warning("step %s was added beside %s, and is cancelled", added, kept)
        _cancel_step(cluster, added, aws)
    return kept


def _waits(cluster: str, step: str, aws: Aws) -> bool:
    found = aws.call("emr", "describe_step", ClusterId=cluster, StepId=step)["Step"]
    return bool(found["Status"]["State"] == "PENDING")


def _cancel_step(cluster: str, step: str, aws: Aws) -> None:
    """Of one that waits for the other; its cluster goes on."""
    aws.ask(
        "emr",
        "cancel_steps",
        refusals=_SHUTTING_DOWN,
        ClusterId=cluster,
        StepIds=[step],
        StepCancellationOption="TERMINATE_PROCESS",
    )


def _clusters(name: str, aws: Aws) -> list[Any]:
    """Those that take steps, the earliest first."""
    return _named(name, aws.all("emr", "list_clusters", "Clusters", ClusterStates=list(USABLE)))


def _clusters_of_late(name: str, aws: Aws) -> list[Any]:
    """As `_clusters`, with those that have ended."""
    since = datetime.now(UTC) - FOUND_WITHIN
    ended = aws.all("emr", "list_clusters", "Clusters", ClusterStates=list(ENDED), CreatedAfter=since)
    return _named(name, [*_clusters(name, aws), *ended])


def _earliest_step(cluster: str, name: str, aws: Aws) -> str | None:
    return _first(_named(name, aws.all("emr", "list_steps", "Steps", ClusterId=cluster)))


def _named(name: str, found: list[Any]) -> list[Any]:
    return sorted((one for one in found if one["Name"] == name), key=_age)


def _first(found: list[Any]) -> str | None:
    return str(found[0]["Id"]) if found else None


def _age(found: Any) -> tuple[datetime, str]:
    """Both submitters see the same one as the earlier; one without a time is just being made."""
    made = found.get("Status", {}).get("Timeline", {}).get("CreationDateTime")
    return made or _LATEST, str(found["Id"])


def _why(status: Any) -> str | None:
    details, reason = status.get("FailureDetails") or {}, status.get("StateChangeReason") or {}
    said = [details.get("Reason"), details.get("Message") or reason.get("Message"), details.get("LogFile")]
    return "; ".join(" ".join(one.split()) for one in said if one) or None


def _cluster_trouble(cluster: str, aws: Aws) -> str | None:
    """What ended the cluster, if it is no ordinary end."""
    status = aws.call("emr", "describe_cluster", ClusterId=cluster)["Cluster"]["Status"]
    reason = status.get("StateChangeReason") or {}
    if status["State"] != "TERMINATED_WITH_ERRORS" and reason.get("Code") in _ORDINARY_ENDS:
        return None
    return f"the EMR cluster {cluster} ended: {reason.get('Message') or reason.get('Code')}"
