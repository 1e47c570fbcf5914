"""What is wrong with a job, or with what is asked of it."""

from __future__ import annotations

from dormouse.errors.base import DormouseError, Told

__all__ = [
    "JobCancelled", "JobError", "JobForbidden", "JobIdTaken", "JobLost", "JobNotEnded", "JobNotFound",
]  # fmt: skip


class JobError(DormouseError):
    """The job does not allow it."""

    job_id = Told[str]()


class JobNotFound(JobError, LookupError):
    """There is no such job, or it is another owner's."""


class JobIdTaken(JobError):
    """Another job has this id."""


class JobNotEnded(JobError):
    """The job has no result yet."""


class JobCancelled(JobError):
    """The job was cancelled; raised by `progress` in its function, too."""


class JobLost(JobError):
    """The worker has lost the job: its lease was over, or it is being stopped; another one runs it."""


class JobForbidden(JobError):
    """The holder of this token may not start this kind of job."""

    kind = Told[str]()
