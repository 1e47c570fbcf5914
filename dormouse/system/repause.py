"""Keeps a paused instance asleep: AWS starts a stopped cluster after 7 days, and says so in an event.

The event lies in a queue, whose message comes back every 9 minutes until the cluster is stopped, or is wanted
to run: it can be stopped only when its start has ended, which outlasts a lambda by far.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dormouse.system.aws import Aws
from dormouse.system.database import ASLEEP, STOPPING, cluster_status, start, stop

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repaused:
    """What one look came to."""

    desired: str | None
    """None if there is no such parameter: the instance is being destroyed."""

    status: str | None
    """Of the cluster; None if there is none."""

    ended: bool
    """Whether nothing is left to do; else it is to be called again later."""

    @property
    def runs_while_paused(self) -> bool:
        return self.desired == "paused" and self.status not in {None, STOPPING, *ASLEEP}


def repause(aws: Aws, cluster: str, parameter: str) -> Repaused:
    """Stops the cluster if it is wanted to sleep. It may be called at any time, and several times at once."""
    desired = aws.parameter(parameter)
    if desired != "paused":
        return _let_run(aws, cluster, desired)
    stop(aws, cluster)  # first of all: a state seen before may be over by now
    status = cluster_status(aws, cluster)
    if (now := aws.parameter(parameter)) != "paused":
        return _let_run(aws, cluster, now)
    return Repaused(now, status, ended=status is None or status in ASLEEP)


def _let_run(aws: Aws, cluster: str, desired: str | None) -> Repaused:
    """Starts the cluster again if it was stopped during a resume, which may have ended since."""
    status = cluster_status(aws, cluster)
    if desired != "running" or status not in {STOPPING, *ASLEEP}:
        return Repaused(desired, status, ended=True)
    if status != STOPPING:
        logger.warning("cluster %s is %s though it is wanted to run: starting it", cluster, status)
        start(aws, cluster)
    return Repaused(desired, status, ended=False)
