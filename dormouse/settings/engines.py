"""The settings of compaction, one model for each engine that Spark runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dormouse.settings.section import (
    EveryMinutes,
    InstanceClass,
    MemoryMb,
    Section,
    TimeoutSeconds,
    has_instance_store,
    setting,
)

INSTANCE_TYPES_MAX = 5
"""Of a fleet of EMR."""


class _Compaction(Section):
    every_minutes: EveryMinutes = setting(15)
    """How often compaction jobs are made."""

    jobs_max: int = setting(20_000, ge=1, le=100_000)
    """How many jobs one run gets at most."""

    run_minutes_max: int = setting(360, ge=10, le=2_880)
    """After how long a run is cancelled; what it finished stays finished."""

    memory_mb: MemoryMb = setting(1_024)
    """The memory of the lambdas."""

    timeout_seconds: TimeoutSeconds = setting(300)
    """How long the lambda may take to make jobs."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How long the logs of runs are kept."""


class EmrServerlessCompaction(_Compaction):
    """Compaction on EMR Serverless."""

    engine: Literal["emr-serverless"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""

    vcpu_max: int = setting(64, ge=4, le=4_000)
    """The most virtual CPUs of the application at once; memory and disk follow from it."""

    idle_minutes: int = setting(5, ge=1, le=10_080)
    """After how long without a run the application stops itself."""

    worker_vcpu: Literal[1, 2, 4, 8, 16] = setting(4)
    """The virtual CPUs of each executor, with 4 GB of memory to each."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.vcpu_max < 2 * self.worker_vcpu:
            yield "vcpu_max", f"it must be at least twice worker_vcpu, which is {self.worker_vcpu}"


class _Ec2Compaction(_Compaction):
    instance_types: tuple[InstanceClass, ...] = setting(
        ("m7g.xlarge", "m6g.xlarge"), strict=False, min_length=1
    )
    """Up to five instance types of the cluster, the most wanted first, of the instance's architecture."""

    instances_max: int = setting(10, ge=1, le=500)
    """The most core instances."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if len(set(self.instance_types)) < len(self.instance_types):
            yield "instance_types", "each must be there only once"
        if len(self.instance_types) > INSTANCE_TYPES_MAX:
            yield "instance_types", f"EMR takes {INSTANCE_TYPES_MAX} at most"
        if storing := [one for one in self.instance_types if has_instance_store(one)]:
            yield (
                "instance_types",
                f"{', '.join(storing)}: the disks of such an instance are encrypted with KMS, which the "
                "network does not reach; take a type without, like m7g.xlarge",
            )


class EmrStepsCompaction(_Ec2Compaction):
    """Compaction as steps on a cluster that scales, and ends when it is idle."""

    engine: Literal["emr-ec2-steps"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""

    idle_minutes: int = setting(15, ge=1, le=10_080)
    """After how long without a step the cluster ends."""


class EmrTransientCompaction(_Ec2Compaction):
    """Compaction on a cluster of its own for each run."""

    engine: Literal["emr-ec2-transient"] = setting(change="replacement")
    """`emr-serverless`, `emr-ec2-steps` or `emr-ec2-transient`."""


CompactionSettings = Annotated[
    EmrServerlessCompaction | EmrStepsCompaction | EmrTransientCompaction, Field(discriminator="engine")
]
