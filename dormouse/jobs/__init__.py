"""Background jobs: programs start them, workers on any machine run them, and both can list them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dormouse.jobs.job import Job, JobState, KindOfJob
from dormouse.jobs.runs import Progress
from dormouse.jobs.store import JobStore

if TYPE_CHECKING:
    from dormouse.jobs.runs import JobFunction
    from dormouse.jobs.worker import Worker

__all__ = ["Job", "JobFunction", "JobState", "JobStore", "KindOfJob", "Progress", "Worker"]

_HOMES = {"JobFunction": "runs", "Worker": "worker"}


def __getattr__(name: str) -> Any:
    """Loads the modules that run jobs at their first use, as most processes only start jobs."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
