"""Verbs on the tables of a deployed instance. Its lambdas run them, so the caller needs no database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse import errors
from dormouse.aws.aws import AwsRefused
from dormouse.aws.instance import DeployedInstance
from dormouse.errors import DormouseError, InstanceError

SECONDS_MAX = 910.0
"""The time in seconds to wait for an answer. A lambda may wait 900 seconds for other users of a table."""


def ask(instance: DeployedInstance, request: Mapping[str, Any], *, changes: bool) -> Any:
    """Sends a request of `dormouse.verbs.tables` to the instance's lambda and returns the answer.

    With `changes`, the lambda for changes gets the request, otherwise the one that only reads. Raises the
    error that the lambda answered. Raises `InstanceError` while the instance is paused, or if no answer
    comes.
    """
    resources = instance.resources.tables
    if resources is None:
        raise InstanceError(f"{instance.id} has no lambdas for its tables: deploy it with this Dormouse")
    if instance.desired == "paused":
        raise InstanceError(
            f"{instance.id} is paused, so its database is stopped: run dormouse resume --instance "
            f"{instance.id}"
        )
    try:
        said = instance.aws.invoke(
            resources.change if changes else resources.show, request, seconds_max=SECONDS_MAX
        )
    except AwsRefused:
        raise
    except InstanceError as error:
        if not changes:
            raise
        look = f"look with dormouse table list --instance {instance.id}"
        raise InstanceError(f"{error}; it is not known whether the change was made: {look}") from error
    if "error" in said:
        raise _error(**said["error"])
    return said["answer"]


def _error(kind: str, message: str) -> DormouseError:
    """Returns the error that the lambda named, or an `InstanceError` if its class is not known here."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, DormouseError):
        return found.from_message(message)
    return InstanceError(message)
