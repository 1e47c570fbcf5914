"""Runs of Spark on EMR: submitting each run once, reading its state, and cancelling it.

EMR on EC2 has no tokens for idempotent requests. So the submitter looks for a run of the same name before and
after it submits. Of two concurrent runs the earlier one stays, and the submitter of the other ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.errors import InstanceError, InvalidInput
from dormouse.model.loops import tries
from dormouse.settings.lambdas import Engine, RunsEnvironment, field

logger = logging.getLogger(__name__)

SERVERLESS, TRANSIENT = "emr-serverless", "emr-ec2-transient"
ENGINES = get_args(Engine)
RunState = Literal["RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
ENVIRONMENT = "environment"
"""The folder of the unpacked archive, beside the driver and each executor."""

PYTHON = f"./{ENVIRONMENT}/bin/python"
DISK_GB_PER_VCPU, DISK_GB_MIN, DISK_GB_MAX = 10, 20, 200
DRIVER_VCPU_MAX = 4
STEP_VCPU = 2
EXECUTORS_MAX = 1_000

_COMMON = {
    # Dormouse counts attempts: a dead task's job is released, or given up after its last attempt
    "spark.task.maxFailures": "1",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": "60s",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "1",
}

USABLE = ("STARTING", "BOOTSTRAPPING", "RUNNING", "WAITING")
ENDED = ("TERMINATING", "TERMINATED", "TERMINATED_WITH_ERRORS")
FOUND_WITHIN = timedelta(hours=6)
"""The age up to which the submitter looks among ended clusters for one that already had the run."""

TRIES_MAX = 3
_SHUTTING_DOWN = frozenset({"InvalidRequestException", "ValidationException"})
_ORDINARY_ENDS = {None, "", "USER_REQUEST", "ALL_STEPS_COMPLETED"}
_LATEST = datetime.max.replace(tzinfo=UTC)
_ENDED: dict[str, RunState] = {"SUCCESS": "SUCCEEDED", "FAILED": "FAILED", "CANCELLED": "CANCELLED"}
_REFUSED_AS_ENDED = frozenset({"ValidationException"})


@dataclass(frozen=True, slots=True)
class Run:
    """A run to submit. `list` is the URL of its list of work, and `jobs` the number of jobs in the list."""

    run_id: str
    kind: str
    list: str
    jobs: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Run:
        """Returns a run from the result of `RunList.summary`. Raises `InvalidInput` for a missing field."""
        run_id, kind, run_list = (field(event, name, str) for name in ("run_id", "kind", "list"))
        return cls(run_id, kind, run_list, field(event, "jobs", int))


@dataclass(frozen=True, slots=True)
class Followed:
    """The state of a run, and the reason that AWS gives for it."""

    state: RunState
    reason: str | None = None


def submit(environment: RunsEnvironment, run: Run, aws: Aws) -> dict[str, str]:
    """Starts a run on the environment's engine, unless it was started before.

    Returns the identifiers of the run. `follow` and `cancel` take these identifiers. On EMR Serverless they
    are {"engine", "run_id", "application", "id"}, where "id" is the job run. On EC2 they are {"engine",
    "run_id", "cluster", "id"}, where "id" is the step.
    """
    submitted = {"engine": environment.engine, "run_id": run.run_id}
    if environment.engine == SERVERLESS:
        return submitted | _submit_serverless(environment, run, aws)
    cluster, step = _submit_to_cluster(environment, run, aws)
    return submitted | {"cluster": cluster, "id": step}


def follow(event: Mapping[str, Any], aws: Aws) -> Followed:
    """Returns the state of a run.

    `event` is the result of `submit`. Raises `InvalidInput` if a field is missing.
    """
    submitted = _submitted(event)
    if submitted["engine"] != SERVERLESS:
        return _follow_step(submitted["cluster"], submitted["id"], aws)
    found = aws.call(
        "emr-serverless",
        "get_job_run",
        applicationId=submitted["application"],
        jobRunId=submitted["id"],
    )["jobRun"]
    details = " ".join((found.get("stateDetails") or "").split())
    return Followed(_ENDED.get(found["state"], "RUNNING"), details or None)


def cancel(event: Mapping[str, Any], aws: Aws) -> None:
    """Requests the end of a run, and ignores a run that has ended.

    `follow` shows when the run has ended. `event` is the result of `submit`. Raises `InvalidInput` if a field
    is missing.
    """
    submitted = _submitted(event)
    if submitted["engine"] != SERVERLESS:
        _cancel_on_cluster(submitted["engine"], submitted["cluster"], submitted["id"], aws)
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
    """Returns the name of the run in AWS's console: dev-compaction-<run id>."""
    return f"{environment.instance_id}-{run.kind}-{run.run_id}"


def _submit_serverless(environment: RunsEnvironment, run: Run, aws: Aws) -> dict[str, str]:
    """Submits with the run id as client token: EMR returns the same job run for a repeated request."""
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


# How Spark is started: the archive as its Python, the size and number of executors.


def application_arguments(environment: RunsEnvironment, run_list: str) -> list[str]:
    """Returns the arguments of the entry script."""
    arguments = ["--list", run_list, "--dsn", environment.dsn, "--objects", environment.objects]
    return [*arguments, "--region", environment.region] if environment.region else arguments


def serverless_parameters(environment: RunsEnvironment, jobs: int) -> list[str]:
    """Returns the options of spark-submit on EMR Serverless."""
    vcpu = environment.worker_vcpu
    driver = min(vcpu, DRIVER_VCPU_MAX)
    disk = min(DISK_GB_MAX, max(DISK_GB_MIN, DISK_GB_PER_VCPU * vcpu))
    return _options(
        {
            "spark.archives": f"{environment.archive}#{ENVIRONMENT}",
            "spark.emr-serverless.driverEnv.PYSPARK_DRIVER_PYTHON": PYTHON,
            "spark.emr-serverless.driverEnv.PYSPARK_PYTHON": PYTHON,
            "spark.executorEnv.PYSPARK_PYTHON": PYTHON,
            # merges are native code in Python workers, which need most of the 4 GB of a CPU
            **_size("driver", driver, heap_gb=driver, beside_gb=3 * driver),
            **_size("executor", vcpu, heap_gb=vcpu, beside_gb=3 * vcpu),
            "spark.emr-serverless.executor.disk": f"{disk}g",
            **_COMMON,
            "spark.dynamicAllocation.maxExecutors": str(executors_max(jobs, vcpu)),
        }
    )


def step_arguments(environment: RunsEnvironment, run_list: str, jobs: int) -> list[str]:
    """Returns the command of a step on EMR on EC2, whose driver runs in a YARN container beside the archive.

    Two executors and the driver fit into the 12 GB that YARN has of a machine with 4 CPUs and 16 GB.
    """
    settings = {
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": PYTHON,
        "spark.executorEnv.PYSPARK_PYTHON": PYTHON,
        # one try: a dead driver is reported, and its unfinished jobs go to the next run
        "spark.yarn.maxAppAttempts": "1",
        **_size("driver", 1, heap_gb=1, beside_gb=1),
        **_size("executor", STEP_VCPU, heap_gb=1, beside_gb=4),
        **_COMMON,
        "spark.dynamicAllocation.maxExecutors": str(executors_max(jobs, STEP_VCPU)),
    }
    submit = ["spark-submit", "--deploy-mode", "cluster"]
    archive = ["--archives", f"{environment.archive}#{ENVIRONMENT}"]
    arguments = application_arguments(environment, run_list)
    return [*submit, *archive, *_options(settings), environment.entry, *arguments]


def executors_max(jobs: int, vcpu: int) -> int:
    """Returns the largest number of executors. Together they have about one CPU for each job."""
    return max(1, min(EXECUTORS_MAX, -(-jobs // vcpu)))


def _size(what: str, vcpu: int, *, heap_gb: int, beside_gb: int) -> dict[str, str]:
    return {
        f"spark.{what}.cores": str(vcpu),
        f"spark.{what}.memory": f"{heap_gb}g",
        f"spark.{what}.memoryOverhead": f"{beside_gb}g",
    }


def _options(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


# Runs on EMR on EC2: steps of a shared cluster, or of a cluster for one run.


def _submit_to_cluster(environment: RunsEnvironment, run: Run, aws: Aws) -> tuple[str, str]:
    """Submits a run to EMR on EC2, unless it was submitted before.

    Returns the ids of its cluster and step.
    """
    step = {
        "Name": run_name(environment, run),
        "ActionOnFailure": "TERMINATE_CLUSTER" if environment.engine == TRANSIENT else "CONTINUE",
        "HadoopJarStep": {
            "Jar": "command-runner.jar",
            "Args": step_arguments(environment, run.list, run.jobs),
        },
    }
    if environment.engine == TRANSIENT:
        return _submit_alone(environment, run.run_id, step, aws)
    return _submit_step(environment, step, aws)


def _follow_step(cluster: str, step: str, aws: Aws) -> Followed:
    status = _step_status(cluster, step, aws)
    match status["State"]:
        case "COMPLETED":
            return Followed("SUCCEEDED")
        case "FAILED" | "INTERRUPTED":
            return Followed("FAILED", _why(status) or _cluster_trouble(cluster, aws))
        case "CANCELLED":
            # a cluster that could not start also has cancelled steps
            trouble = _cluster_trouble(cluster, aws)
            return Followed("FAILED", trouble) if trouble else Followed("CANCELLED", _why(status))
    return Followed("RUNNING")


def _step_status(cluster: str, step: str, aws: Aws) -> Any:
    return aws.call("emr", "describe_step", ClusterId=cluster, StepId=step)["Step"]["Status"]


def _cancel_on_cluster(engine: str, cluster: str, step: str, aws: Aws) -> None:
    """Ends a run by ending its cluster. Cancelling only the step would leave the driver running in YARN.

    Other runs on the cluster end as well, and later runs take over their work. A step that has not started
    has no driver, so it alone is cancelled.
    """
    if engine != TRANSIENT and _step_status(cluster, step, aws)["State"] == "PENDING":
        _cancel_step(cluster, step, aws)
        return
    aws.ask("emr", "terminate_job_flows", refusals=_SHUTTING_DOWN, JobFlowIds=[cluster])


def _submit_alone(
    environment: RunsEnvironment, run_id: str, step: dict[str, Any], aws: Aws
) -> tuple[str, str]:
    name = f"{environment.cluster_name}-{run_id}"
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
            # the idle cluster began to end after it was listed
            if refused.code not in _SHUTTING_DOWN:
                raise
            failure = refused
            logger.info("cluster %s no longer accepts steps: %s", cluster, refused)
            continue
        return cluster, _settle_step(cluster, added, step["Name"], aws)
    raise failure


def _start(environment: RunsEnvironment, name: str, steps: list[dict[str, Any]], aws: Aws) -> str:
    """Creates a cluster and returns its id.

    If another submitter created the same one before, returns that one's id.
    """
    template = environment.cluster_template or {}
    instances = {
        **template.get("Instances", {}),
        "KeepJobFlowAliveWhenNoSteps": environment.engine != TRANSIENT,
    }
    request = {**template, "Name": name, "Instances": instances, "Steps": steps}
    made = str(aws.call("emr", "run_job_flow", **request)["JobFlowId"])
    kept = _first(_clusters(name, aws)) or made
    if kept != made:
        logger.warning("cluster %s was created while %s was being created, and is terminated", made, kept)
        aws.call("emr", "terminate_job_flows", JobFlowIds=[made])
    return kept


def _settle_step(cluster: str, added: str, name: str, aws: Aws) -> str:
    kept = _earliest_step(cluster, name, aws) or added
    if kept != added:
        logger.warning("step %s was added while %s was being added, and is cancelled", added, kept)
        _cancel_step(cluster, added, aws)
    return kept


def _cancel_step(cluster: str, step: str, aws: Aws) -> None:
    """Cancels a waiting step; its cluster keeps running."""
    aws.ask(
        "emr",
        "cancel_steps",
        refusals=_SHUTTING_DOWN,
        ClusterId=cluster,
        StepIds=[step],
        StepCancellationOption="TERMINATE_PROCESS",
    )


def _clusters(name: str, aws: Aws) -> list[Any]:
    """Returns the clusters of this name that accept steps, the earliest first."""
    return _named(name, aws.all("emr", "list_clusters", "Clusters", ClusterStates=list(USABLE)))


def _clusters_of_late(name: str, aws: Aws) -> list[Any]:
    """Returns the clusters of this name that accept steps, then those that ended recently."""
    since = datetime.now(UTC) - FOUND_WITHIN
    ended = aws.all("emr", "list_clusters", "Clusters", ClusterStates=list(ENDED), CreatedAfter=since)
    return _named(name, [*_clusters(name, aws), *ended])


def _earliest_step(cluster: str, name: str, aws: Aws) -> str | None:
    return _first(_named(name, aws.all("emr", "list_steps", "Steps", ClusterId=cluster)))


def _named(name: str, clusters: list[Any]) -> list[Any]:
    return sorted((one for one in clusters if one["Name"] == name), key=_age)


def _first(clusters: list[Any]) -> str | None:
    return str(clusters[0]["Id"]) if clusters else None


def _age(clusters: Any) -> tuple[datetime, str]:
    """Returns a sort key of a cluster or step, by which all submitters agree on the earliest one.

    A cluster without a time of creation is just being created, and comes last.
    """
    made = clusters.get("Status", {}).get("Timeline", {}).get("CreationDateTime")
    return made or _LATEST, str(clusters["Id"])


def _why(status: Any) -> str | None:
    details, reason = status.get("FailureDetails") or {}, status.get("StateChangeReason") or {}
    said = [details.get("Reason"), details.get("Message") or reason.get("Message"), details.get("LogFile")]
    return "; ".join(" ".join(one.split()) for one in said if one) or None


def _cluster_trouble(cluster: str, aws: Aws) -> str | None:
    """Returns the reason why a cluster ended, or None if it ended normally."""
    status = aws.call("emr", "describe_cluster", ClusterId=cluster)["Cluster"]["Status"]
    reason = status.get("StateChangeReason") or {}
    if status["State"] != "TERMINATED_WITH_ERRORS" and reason.get("Code") in _ORDINARY_ENDS:
        return None
    return f"the EMR cluster {cluster} ended: {reason.get('Message') or reason.get('Code')}"
