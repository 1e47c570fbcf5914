"""What the handlers of one app work with."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.instance import Instance
from dormouse.service.health import Readiness
from dormouse.service.metrics import Metrics
from dormouse.service.running import Runner
from dormouse.service.work import Limits


@dataclass(frozen=True)
class Service:
    """An instance, and how it is asked."""

    instance: Instance
    runner: Runner
    readiness: Readiness
    metrics: Metrics
    limits: Limits
