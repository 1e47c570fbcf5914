"""How Spark is started on EMR: the archive as its Python, the size of executors, how many there may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dormouse.settings.lambdas import RunsEnvironment, field

RunState = Literal["RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
ENVIRONMENT = "environment"
"""The folder that the archive is unpacked to, beside the driver and each executor."""

PYTHON = f"./{ENVIRONMENT}/bin/python"
DISK_GB_PER_VCPU, DISK_GB_MIN, DISK_GB_MAX = 10, 20, 200
DRIVER_VCPU_MAX = 4
STEP_VCPU = 2
EXECUTORS_MAX = 1_000

_COMMON = {
    # an attempt is ours to count: a task that dies is put back, or given up after its last attempt
    "spark.task.maxFailures": "1",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": "60s",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "1",
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run to submit; `list` is the URL of what it is to do, with so many `jobs`."""

    run_id: str
    kind: str
    list: str
    jobs: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Run:
        """From what `RunList.summary` gave; `InvalidInput` names what is missing."""
        run_id, kind, run_list = (field(event, name, str) for name in ("run_id", "kind", "list"))
        return cls(run_id, kind, run_list, field(event, "jobs", int))


def application_arguments(environment: RunsEnvironment, run_list: str) -> list[str]:
    """The arguments of the entry script."""
    arguments = ["--list", run_list, "--dsn", environment.dsn, "--objects", environment.objects]
    return [*arguments, "--region", environment.region] if environment.region else arguments


def serverless_parameters(environment: RunsEnvironment, jobs: int) -> list[str]:
    """The options of spark-submit on EMR Serverless."""
    vcpu = environment.worker_vcpu
    driver = min(vcpu, DRIVER_VCPU_MAX)
    disk = min(DISK_GB_MAX, max(DISK_GB_MIN, DISK_GB_PER_VCPU * vcpu))
    return _options(
        {
            "spark.archives": f"{environment.archive}#{ENVIRONMENT}",
            "spark.emr-serverless.driverEnv.PYSPARK_DRIVER_PYTHON": PYTHON,
            "spark.emr-serverless.driverEnv.PYSPARK_PYTHON": PYTHON,
            "spark.executorEnv.PYSPARK_PYTHON": PYTHON,
            # merges are native code in Python workers: most of the 4 GB a CPU is theirs, and not Java's
            **_size("driver", driver, heap_gb=driver, beside_gb=3 * driver),
            **_size("executor", vcpu, heap_gb=vcpu, beside_gb=3 * vcpu),
            "spark.emr-serverless.executor.disk": f"{disk}g",
            **_COMMON,
            "spark.dynamicAllocation.maxExecutors": str(executors_max(jobs, vcpu)),
        }
    )


def step_arguments(environment: RunsEnvironment, run_list: str, jobs: int) -> list[str]:
    """The command of a step on EMR on EC2; its driver is in a container of YARN, beside the archive.

    Two executors and the driver fit into the 12 GB that YARN has of a machine with 4 CPUs and 16 GB.
    """
    settings = {
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": PYTHON,
        "spark.executorEnv.PYSPARK_PYTHON": PYTHON,
        # one try: a driver that died is reported, and what it left is in the next run
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
    """No more than there are jobs for."""
    return max(1, min(EXECUTORS_MAX, -(-jobs // vcpu)))


def _size(what: str, vcpu: int, *, heap_gb: int, beside_gb: int) -> dict[str, str]:
    return {
        f"spark.{what}.cores": str(vcpu),
        f"spark.{what}.memory": f"{heap_gb}g",
        f"spark.{what}.memoryOverhead": f"{beside_gb}g",
    }


def _options(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
