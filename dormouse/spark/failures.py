"""The error of ours that is hidden in a Spark job's failure."""

from __future__ import annotations

import re

from dormouse import errors
from dormouse.errors import DormouseError, JobFailed
from dormouse.spark.tasks import _reason

_OURS = re.compile(r"^\s*dormouse\.errors\.(\w+): (.+?)\s*$", re.MULTILINE)


def dormouse_error(failure: Exception) -> DormouseError:
    """What a task raised, if it was one of ours, in its one line; else `JobFailed` with Spark's reason."""
    if isinstance(failure, DormouseError):
        return failure
    for name, message in reversed(_OURS.findall(str(failure))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, DormouseError):
            return kind(message)
    return JobFailed(f"the Spark job failed: {_reason(failure)}")
