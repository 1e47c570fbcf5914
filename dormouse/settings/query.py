"""The settings of the query service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from dormouse.settings.section import ClientCidr, Section, SecurityGroupId, client_problems, pattern, setting

CPU_MEMORY_GB = {
    256: (0.5, 1, 2),
    512: tuple(range(1, 5)),
    1_024: tuple(range(2, 9)),
    2_048: tuple(range(4, 17)),
    4_096: tuple(range(8, 31)),
    8_192: tuple(range(16, 61, 4)),
    16_384: tuple(range(32, 121, 8)),
}
"""Which memory goes with which CPU on Fargate."""

FREE_DISK_GB = 20
"""What every task has; Fargate takes no smaller number."""

IDLE_SECONDS_MAX = 4_000
"""Of a load balancer."""

FIRST_ROW_SPARE_SECONDS = 60


class QuerySettings(Section):
    """The query service: `dormouse serve` on Fargate, behind an internal load balancer."""

    cpu: Literal[256, 512, 1024, 2048, 4096, 8192, 16384] = setting(1024)
    """The CPU of a task; 1024 is one virtual CPU."""

    memory_gb: float = setting(4, ge=0.5, le=120)
    """The memory of a task. Fargate says which goes with which CPU: with cpu = 1024, 2 to 8."""

    disk_gb: int = setting(FREE_DISK_GB, ge=FREE_DISK_GB, le=200)
    """The disk of a task, where sorts and joins spill; 20 are free."""

    tasks_min: int = setting(1, ge=1, le=100)
    """How many tasks run at least; with 2 one may be lost without a query being refused."""

    tasks_max: int = setting(4, ge=1, le=100)
    """How many tasks run at most, when there is much to do."""

    cpu_percent: int = setting(60, ge=10, le=90)
    """The average CPU at which tasks are added, and below which they are taken away."""

    requests_minute: int = setting(600, ge=1, le=1_000_000)
    """How many requests a minute one task takes before another is added."""

    queries_max: int = setting(16, ge=1, le=1_000)
    """How many queries one task runs at once; more wait for some seconds, then are told to come later."""

    rows_max: int | None = setting(None, ge=1)
    """The most rows of one answer; left out, as many as there are."""

    bytes_max: int | None = setting(None, ge=1)
    """The most bytes of one answer; left out, as many as there are."""

    seconds_max: int = setting(300, ge=1, le=3_600)
    """How long one query may take, with its answer; tasks that end let answers end for as long."""

    client_cidrs: tuple[ClientCidr, ...] = setting((), strict=False)
    """The private networks whose machines may call it, at any address within. No others may."""

    client_security_groups: tuple[SecurityGroupId, ...] = setting((), strict=False)
    """The security groups whose machines may call it."""

    certificate_arn: str | None = setting(None, pattern=pattern("certificate"))
    """A certificate in ACM for `host`: clients speak HTTPS then, else HTTP within the VPC."""

    host: str | None = setting(None, change="replacement", pattern=pattern("host"))
    """The name by which clients in the VPC call it; `query.<id>.dormouse.internal` if left out."""

    image: str | None = setting(None, pattern=pattern("image"))
    """An image in ECR that is there already; left out, a deploy builds one with Docker and uploads it."""

    endpoints: Literal["create", "existing"] | None = setting(None)
    """Whether the VPC gets the interface endpoints that tasks need, or has a way to ECR, CloudWatch Logs and
    Secrets Manager. `create` in an own VPC. An existing one needs a word: all in it would use them."""

    log_days: Literal[7, 14, 30, 60, 90, 180, 365] = setting(30)
    """How long the log of the service is kept."""

    @property
    def memory_mb(self) -> int:
        return round(self.memory_gb * 1_024)

    @property
    def idle_seconds(self) -> int:
        """How long the load balancer lets a connection be silent, as before the first row."""
        return min(IDLE_SECONDS_MAX, self.seconds_max + FIRST_ROW_SPARE_SECONDS)

    @property
    def port(self) -> int:
        """Where clients connect to."""
        return 443 if self.certificate_arn else 80

    def host_of(self, instance_id: str) -> str:
        return self.host or f"query.{instance_id}.dormouse.internal"

    def url(self, instance_id: str) -> str:
        return f"{'https' if self.certificate_arn else 'http'}://{self.host_of(instance_id)}"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        fitting = CPU_MEMORY_GB[self.cpu]
        if self.memory_gb not in fitting:
            yield "memory_gb", f"with cpu = {self.cpu} Fargate has {_listed(fitting)}"
        if self.tasks_max < self.tasks_min:
            yield "tasks_max", f"it must be tasks_min or more, which is {self.tasks_min}"
        if self.certificate_arn is not None and self.host is None:
            yield "certificate_arn", "it is for a name: give that as host"
        yield from client_problems(self.client_cidrs, self.client_security_groups)


def _listed(sizes: tuple[float, ...]) -> str:
    texts = [f"{size:g}" for size in sizes]
    if len(texts) > 3:
        step = sizes[1] - sizes[0]
        return f"{texts[0]} to {texts[-1]} GB of memory" + (f", in steps of {step:g}" if step > 1 else "")
    return f"{', '.join(texts[:-1])} or {texts[-1]} GB of memory"
