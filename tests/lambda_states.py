"""A lambda of AWS in a VPC, with its states: Active, Inactive, Pending and Failed.

AWS's documentation describes them in "Lambda function states" and "How Lambda handles errors and retries with
asynchronous invocation".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

from botocore.exceptions import ClientError

from tests.fake_clock import FakeClock

IDLE = "The function is idle."
PENDING_CODES = ("ResourceNotReadyException", "ResourceConflictException", "CodeArtifactUserPendingException")


class StatefulLambda:
    """A substitute for a boto3 session and its client of Lambda, with one lambda.

    A call of the inactive lambda fails and makes it pending. After `pending_seconds` it has the state `then`.
    A call of the pending lambda fails, too. An event of an asynchronous call waits in a queue: AWS tries it
    again after 1, 2, 4 seconds and so on, and drops it after `age_seconds_max`.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        clock: FakeClock,
        *,
        state: str = "Inactive",
        pending_seconds: float = 130,
        then: str = "Active",
        age_seconds_max: float = 60,
    ) -> None:
        self._run, self._clock = run, clock
        self.state, self.pending_seconds, self.then = state, pending_seconds, then
        self.age_seconds_max = age_seconds_max
        self.calls: list[str] = []
        """The states in which the lambda was called."""
        self.refused: list[Any] = []
        """The events of the calls that AWS refused."""
        self.dropped = 0

    def client(self, *_: object, **__: object) -> StatefulLambda:
        return self

    def get_function_configuration(self, **_: object) -> dict[str, Any]:
        reason = {"StateReason": IDLE} if self.state == "Inactive" else {}
        reason = {"StateReason": "The subnet does not exist."} if self.state == "Failed" else reason
        return {"State": self.state, "Timeout": 60, **reason}

    def invoke(self, **given: Any) -> dict[str, Any]:
        event = json.loads(given["Payload"])
        if given.get("InvocationType") == "Event":
            self.queue(event)
            return {"StatusCode": 202, "Payload": BytesIO(b"")}
        return {"StatusCode": 200, "Payload": BytesIO(json.dumps(self.call(event)).encode())}

    def call(self, event: Any) -> Any:
        """Runs the lambda once. Raises the error of AWS unless it is active."""
        self.calls.append(self.state)
        if self.state == "Active":
            return self._run(event)
        self.refused.append(event)
        code = PENDING_CODES[len(self.calls) % 3] if self.state == "Pending" else PENDING_CODES[0]
        code = "ResourceConflictException" if self.state == "Failed" else code
        if self.state == "Inactive":
            self.state = "Pending"
            self._clock.at.append((self._clock.seconds + self.pending_seconds, self._end_pending))
        error: Any = {"Error": {"Code": code, "Message": f"The function is {self.calls[-1]}"}}
        raise ClientError(error, "Invoke")

    def queue(self, event: Any, *, waited: float = 0.0, pause: float = 1.0) -> None:
        """Tries to run the lambda for a queued event, now and later."""
        try:
            self.call(event)
        except ClientError:
            if waited + pause > self.age_seconds_max:
                self.dropped += 1
                return
            later = (
                self._clock.seconds + pause,
                lambda: self.queue(event, waited=waited + pause, pause=2 * pause),
            )
            self._clock.at.append(later)

    def become_active(self) -> None:
        self.state = "Active"

    def _end_pending(self) -> None:
        self.state = self.then
