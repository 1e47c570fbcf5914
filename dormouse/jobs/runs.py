"""One job that a worker runs: its function is called, and what comes of it becomes the job's end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dormouse.errors import DormouseError, InvalidPayload, JobCancelled, JobLost, one_line
from dormouse.jobs.claims import Ending
from dormouse.jobs.job import TRACEBACK_CHARACTERS_MAX, Claim, shortened
from dormouse.jobs.progress import Progress

JobFunction = Callable[[Any, Progress], Any]
"""Called with the request and the progress; what it returns is the result, a JSON value."""


@dataclass(eq=False)
class Run:
    """A claimed job; its function runs in a thread."""

    claim: Claim
    function: JobFunction
    progress: Progress
    began: float = field(default_factory=time.monotonic)
    is_given_up: bool = False

    def ended(self, request: Any, encode: Callable[[Claim, Any], str]) -> tuple[Ending | None, str | None]:
        """Calls the function; gives the end and the result's JSON. None: another worker is to run it."""
        try:
            result = encode(self.claim, self.function(request, self.progress))
        except InvalidPayload as error:
            return unkept(Ending(self.claim, "COMPLETE", self.progress.told), error), None
        except BaseException as error:  # also what would end the thread, such as sys.exit
            return self._ending_of(error), self._data_of(error, encode)
        return Ending(self.claim, "COMPLETE", self.progress.told), result

    def _data_of(self, error: BaseException, encode: Callable[[Claim, Any], str]) -> str | None:
        """Returns the JSON of an error's data, which is kept in place of a result; None where it has none."""
        if not isinstance(error, DormouseError) or not error.data:
            return None
        try:
            return encode(self.claim, dict(error.data))
        except InvalidPayload:
            return None

    def overdue(self, seconds_max: float) -> Ending:
        """Of one whose function does not come back."""
        self.progress.end(JobLost("the job was given up, as it ran for too long"))
        return self._failed(f"its function did not return within {seconds_max:g} s", None)

    def _ending_of(self, error: BaseException) -> Ending | None:
        causes = list(_chain(error))
        if self.progress.is_lost and any(isinstance(one, JobLost) for one in causes):
            return None
        if self.progress.is_cancelled and any(isinstance(one, JobCancelled) for one in causes):
            return Ending(self.claim, "CANCELLED", self.progress.told)
        said = one_line(error)
        if isinstance(error, SystemExit):
            said = f"its function ended the thread by SystemExit({error.code!r})"
        else:
            said = f"{type(error).__name__}: {said}"
        return self._failed(said, "".join(traceback.format_exception(error)))

    def _failed(self, error: str, trace: str | None) -> Ending:
        told = self.progress.told
        return Ending(
            self.claim, "FAILED", told, shortened(error), shortened(trace, TRACEBACK_CHARACTERS_MAX)
        )


def refused(claim: Claim, why: DormouseError) -> Ending:
    """Of a job whose request cannot be read."""
    return Ending(
        claim, "FAILED", (None, None, None), shortened(f"its request cannot be read: {one_line(why)}")
    )


def unkept(ending: Ending, why: Exception) -> Ending:
    """Of a job whose result cannot be kept."""
    return replace(ending, state="FAILED", error=shortened(f"its result cannot be kept: {one_line(why)}"))


def _chain(error: BaseException | None) -> Any:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
