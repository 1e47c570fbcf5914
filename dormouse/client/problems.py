"""Problem documents (RFC 9457) as the errors that they tell of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dormouse import errors
from dormouse.errors import BatchFailed, DormouseError, InstanceError, InstanceForbidden

URN = "urn:dormouse:"
_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_CLASSES = {
    URN + _WORD.sub("-", name).lower(): found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, DormouseError)
}


def problem_error(problem: Mapping[str, Any], url: str) -> DormouseError:
    """The error that the service met, of its class and with its message; `InstanceError` for others."""
    message = str(problem.get("detail") or problem.get("title") or "there is no reason given")
    found = _CLASSES.get(str(problem.get("type")))
    if found is None:  # the service's own
        status = problem.get("status")
        refused = InstanceForbidden if status in {401, 403} else InstanceError
        return refused(f"{url} answered {status}: {message}" if status else f"{url}: {message}")
    error = found((), ()) if issubclass(found, BatchFailed) else found()
    # some make their message of table, file and job, which only the service knows
    error.args = (message,)
    return error
