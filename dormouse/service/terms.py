"""The terms of a path: the right that it demands, where its work runs, and how long that may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from fastapi import APIRouter

from dormouse.errors import JobForbidden
from dormouse.settings.service import Holder

F = TypeVar("F", bound=Callable[..., Any])
UPLOAD = "row_upload"
PAYLOADS = "payloads"
"""What a token of the file must have among its kinds to read and write payloads; `*` does not include it."""
LOOP_SECONDS_MAX = 10.0
"""The deadline of an answer that the event loop makes itself."""


class Right(Enum):
    """The right that a path demands; the value says which."""

    PUBLIC = "none: the answer says nothing about the instance"
    HOLDER = "a token"
    STARTS = "a token for the kind of job that the body names"
    UPLOADS = f"a token for jobs of kind {UPLOAD}"
    PAYLOADS = "a token for payloads"


class Place(Enum):
    """Where the work of a path runs. All but the first have slots, and a deadline of the settings."""

    LOOP = "the event loop, without a thread"
    LOOKUPS = "a thread for short questions about tables and jobs"
    QUERIES = "a thread for queries by key"
    STATEMENTS = "a thread for SQL statements"
    FILES = "a thread for files that are sent or fetched"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a route was declared with. Of several places, each answer takes one."""

    right: Right
    places: tuple[Place, ...]

    def check(self, holder: Holder | None) -> None:
        """Raises `JobForbidden` unless the holder of a token has the right."""
        if self.right is Right.UPLOADS and holder is not None:
            check_may(holder, UPLOAD)
        if self.right is Right.PAYLOADS and holder is not None:
            is_own = holder.owner is None  # the service's own token
            if not is_own and PAYLOADS not in (holder.kinds or ()):
                raise JobForbidden(f"the token of {holder.owner!r} is not for payloads")


def served(right: Right, *places: Place) -> Callable[[F], F]:
    """Declares the terms of an endpoint; a route cannot be made of one without."""

    def declared(endpoint: F) -> F:
        endpoint.terms = Terms(right, places)  # type: ignore[attr-defined]
        return endpoint

    return declared


def check_may(holder: Holder, kind: str) -> None:
    """Raises `JobForbidden` when the token does not start jobs of a kind."""
    if holder.kinds is not None and kind not in holder.kinds:
        allowed = ", ".join(sorted(holder.kinds))
        said = f"the token of {holder.owner!r} starts jobs of kind {allowed}, not {kind!r}"
        raise JobForbidden(said, kind=kind)


def open_paths(routers: Iterable[APIRouter]) -> frozenset[str]:
    """Returns the paths that need no token."""
    routes = (route for router in routers for route in router.routes)
    return frozenset(
        route.path  # type: ignore[attr-defined]
        for route in routes
        if route.terms.right is Right.PUBLIC  # type: ignore[attr-defined]
    )
