"""The events that CloudFormation sends to custom resources, and the single answer to each event."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from dormouse.aws.aws import Aws
from dormouse.errors import InvalidInput
from dormouse.settings.lambdas import field

REQUESTS = ("Create", "Update", "Delete")
ANSWER_ATTEMPTS_MAX = 5
REASON_CHARACTERS_MAX = 1_000

logger = logging.getLogger("dormouse.lambdas")


def request_type(event: Mapping[str, Any]) -> str:
    """Returns the type of a request: Create, Update or Delete. Raises `InvalidInput` for any other type."""
    given = field(event, "RequestType", str)
    if given not in REQUESTS:
        raise InvalidInput(f"'RequestType' of the event must be Create, Update or Delete, not {given}")
    return given


def properties_before(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties of the resource before an update; an empty dictionary for a new resource."""
    return field(event, "OldResourceProperties", dict) if event.get("OldResourceProperties") else {}


def is_rolled_back(aws: Aws, stack: str) -> bool:
    """Returns whether CloudFormation is rolling back, or has rolled back, the last change of a stack."""
    [described] = aws.call("cloudformation", "describe_stacks", StackName=stack)["Stacks"]
    return "ROLLBACK" in described["StackStatus"]


class Answer:
    """The answer to one event of CloudFormation, sent only once.

    During a rollback, a failure is reported as a success with a note, because a failed rollback would leave
    the stack stuck. Raises `InvalidInput` for an event without the fields that an answer needs.
    """

    def __init__(self, event: Mapping[str, Any], physical_id: str) -> None:
        self._url = field(event, "ResponseURL", str)
        self._of = {name: field(event, name, str) for name in ("StackId", "RequestId", "LogicalResourceId")}
        self._of["PhysicalResourceId"] = event.get("PhysicalResourceId") or physical_id
        properties = event.get("ResourceProperties")
        self._secret = str(properties.get("Password") or "") if isinstance(properties, Mapping) else ""
        self._lock = threading.Lock()
        self._given = False
        self.rolls_back = False

    def succeeded(self, result: str) -> None:
        self._give("SUCCESS", "", {"Result": self._safe(result)})

    def failed(self, reason: str) -> None:
        logger.error("%s: %s", self._of["PhysicalResourceId"], self._safe(reason))
        if self.rolls_back:
            self.succeeded(f"rolled back, and the database is left as it is: {reason}")
        else:
            self._give("FAILED", self._safe(reason), {})

    def _safe(self, text: str) -> str:
        line = " ".join(text.split())
        return (line.replace(self._secret, "…") if self._secret else line)[:REASON_CHARACTERS_MAX]

    def _give(self, status: str, reason: str, data: dict[str, str]) -> None:
        with self._lock:
            if self._given:
                return
            self._given = True
        body = {"Status": status, "Reason": reason, **self._of, "Data": data}
        _put(self._url, json.dumps(body).encode())


def _put(url: str, body: bytes) -> None:
    # the URL is signed for no content type
    request = urllib.request.Request(url, body, {"Content-Type": ""}, method="PUT")  # noqa: S310
    for attempt in range(1, ANSWER_ATTEMPTS_MAX + 1):
        try:
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310
                return
        except (urllib.error.URLError, OSError) as error:
            if attempt == ANSWER_ATTEMPTS_MAX:
                raise
            logger.warning("CloudFormation did not take the answer (attempt %d): %s", attempt, error)
            time.sleep(attempt)
