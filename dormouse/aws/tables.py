"""The tables of a deployed instance, through its lambdas: the caller needs no route to the database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse import errors
from dormouse.aws.aws import AwsRefused
from dormouse.aws.instance import DeployedInstance
from dormouse.errors import DormouseError, InstanceError

SECONDS_MAX = 910.0
"""The time limit: a lambda may wait 900 seconds for other users of a table."""


def ask(instance: DeployedInstance, request: Mapping[str, Any], *, changes: bool) -> Any:
    """Returns the answer to an event of `dormouse.verbs.tables`; `changes` chooses the lambda for changes.

    Raises the error that the instance raised; InstanceError while it is paused, or if no answer comes.
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
    """Returns the error of the lambda, or an `InstanceError` for an unknown class."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, DormouseError):
        return found.from_message(message)
    return InstanceError(message)
