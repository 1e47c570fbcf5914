"""The metrics of the lambdas in CloudWatch: all have one dimension, the instance."""

from __future__ import annotations

from typing import Literal

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
