"""Jobs: asked for by programs, run by workers anywhere, seen by people."""

from dormouse.jobs.job import Job, JobState, KindOfJob
from dormouse.jobs.progress import Progress
from dormouse.jobs.runs import JobFunction
from dormouse.jobs.store import JobStore
from dormouse.jobs.worker import Worker

__all__ = ["Job", "JobFunction", "JobState", "JobStore", "KindOfJob", "Progress", "Worker"]
