"""The access control of the service: tokens, checks of the host and of cross-site requests, and TLS."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes

from fastapi import APIRouter
from pydantic import AfterValidator
from starlette.types import ASGIApp, Receive, Scope, Send

from dormouse.errors import InvalidInput, JobForbidden
from dormouse.service.problems import Refused, problem_of
from dormouse.settings.service import Holder, is_loopback

_SLASH = "\udc2f"
"""The character that replaces a percent-encoded slash in a path, until the path is split into segments.

It is a lone surrogate, which no valid path contains.
"""

SEGMENT = AfterValidator(lambda text: text.replace(_SLASH, "/"))
"""A validator that restores the slashes of a path parameter."""

_READS = frozenset({"GET", "HEAD"})
_OWN_SITE = frozenset({b"same-origin", b"none"})
"""The values of the header `Sec-Fetch-Site` for the service's own pages and for URLs that a user typed."""

F = TypeVar("F", bound=Callable[..., Any])
UPLOAD = "row_upload"
PAYLOADS = "payloads"
"""The kind that a token in the tokens file needs for payloads. The kind `*` does not include it."""
WRITES = "sql_writes"
"""The kind that a token in the tokens file needs for SQL that writes. The kind `*` does not include it."""
LOOP_SECONDS_MAX = 10.0
"""The time limit of an answer that the event loop makes without a thread."""


class Guard:
    """A middleware that lets in requests with a valid token or, if no tokens are configured, local requests.

    Without tokens, it refuses two kinds of requests:

    - requests whose header Host is not this machine, which stops a page of another site that uses DNS
      rebinding;
    - requests that the browser marks as sent by another site, because browsers send simple requests to any
      site.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        host: str,
        holders: Mapping[str, Holder] = MappingProxyType({}),
        open_paths: Collection[str] = (),
    ) -> None:
        """Takes the service's own token, the holders by token, and the paths that need no token."""
        self._app = app
        self._open_paths = open_paths
        self._authorization = None if token is None else f"bearer {token}".encode("ascii")
        self._host = host.lower()
        self._holders = [(f"bearer {token}".encode("ascii"), holder) for token, holder in holders.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _divide_path(scope)
        if scope["type"] == "http" and (refusal := self._refusal(scope) or _not_text(scope)) is not None:
            await problem_of(refusal).response()(scope, receive, send)
            return
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            state["holder"] = self._holder(scope)
            connection = state.get("connection")
            if connection is not None and scope["path"] not in self._open_paths:
                connection.let_in()
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Exception | None:
        if self._authorization is None and not self._holders:
            host = _only(scope, b"host")
            if host is None or not self._is_ours(host.decode("latin-1")):
                return Refused("misdirected-request", "the Host header names another host than this service")
            if _is_of_another_site(scope, host):
                return Refused(
                    "cross-site-request",
                    "the request comes from a page of another site; only the service's own pages may send it",
                )
            return None
        if scope["path"] in self._open_paths or self._holder(scope) is not None:
            return None
        return Refused("unauthorized", "give the service's token: Authorization: Bearer TOKEN")

    def _holder(self, scope: Scope) -> Holder | None:
        """Returns the holder of the request's token, or None if there is no such token.

        If no tokens are configured, returns a holder with all rights.
        """
        if self._authorization is None and not self._holders:
            return Holder()
        scheme, _, token = (_only(scope, b"authorization") or b"").partition(b" ")
        found = scheme.lower() + b" " + token.strip()
        if self._authorization is not None and hmac.compare_digest(found, self._authorization):
            return Holder()
        # all are compared, so that the duration does not reveal which token came close
        mine = [holder for known, holder in self._holders if hmac.compare_digest(found, known)]
        return mine[0] if mine else None

    def _is_ours(self, host: str) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return name == self._host or is_loopback(name)


def _not_text(scope: Scope) -> Exception | None:
    """Returns an error if the path or query is not UTF-8, else None.

    Several invalid texts could decode to the same name.
    """
    try:
        for sent in (scope["raw_path"], scope["query_string"]):
            unquote_to_bytes(sent).decode("utf-8")
    except UnicodeDecodeError:
        return InvalidInput("the path and the query must be UTF-8, percent-encoded")
    return None


def _divide_path(scope: Scope) -> None:
    """Replaces each percent-encoded slash in the path by another character. `SEGMENT` restores the slash.

    A percent-encoded slash is part of a name, such as a job's id, and does not separate segments.
    """
    raw = scope["raw_path"].decode("latin-1")
    if "%2f" in raw.lower():
        scope["path"] = "/".join(unquote(segment).replace("/", _SLASH) for segment in raw.split("/"))


def _is_of_another_site(scope: Scope, host: bytes) -> bool:
    """Returns whether a browser marks the request as sent by a page of another site.

    Links from other sites are allowed. Following a link changes nothing, and only the user sees the answer.
    """
    origin, site = _only(scope, b"origin"), _only(scope, b"sec-fetch-site")
    if origin is None and scope["method"] in _READS:
        return False
    if site is not None:
        return site not in _OWN_SITE
    return origin is not None and origin.lower().partition(b"://")[2] != host.lower()


def _only(scope: Scope, name: bytes) -> bytes | None:
    """Returns the value of a header that occurs exactly once, else None."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else None


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns a server's TLS context, for TLS 1.2 and later.

    Raises `InvalidInput`, which names the file, if the certificate or the key cannot be used.
    """
    for what, path in (("certificate", certificate), ("key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"cannot read the TLS {what} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "it cannot be read"
        raise InvalidInput(
            f"the TLS certificate {certificate} and key {key} are not a PEM certificate and its key without "
            f"a password: {str(reason).lower().replace('_', ' ')}"
        ) from None
    return context


def shown_host(host: str) -> str:
    """Returns a host in the form for a URL, in which an IPv6 address has brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


class Right(Enum):
    """The right that a path requires. The value of each member is its description."""

    PUBLIC = "none: the answer says nothing about the instance"
    HOLDER = "a token"
    STARTS = "a token for the kind of job that the body names"
    UPLOADS = f"a token for jobs of kind {UPLOAD}"
    PAYLOADS = "a token for payloads"
    WRITES = "a token for SQL that writes"


_NAMED = {Right.PAYLOADS: (PAYLOADS, "payloads"), Right.WRITES: (WRITES, f"SQL that writes (kind {WRITES})")}
"""The kinds that a token must name for a right, and what they are for."""
RIGHTS = tuple(kind for kind, _ in _NAMED.values())
"""The kinds in the tokens file that are no kinds of jobs."""


class Place(Enum):
    """The place where the work of a path runs. All but LOOP have slots and a time limit from the settings."""

    LOOP = "the event loop, without a thread"
    LOOKUPS = "a thread for short questions about tables and jobs"
    QUERIES = "a thread for queries by key"
    STATEMENTS = "a thread for SQL statements"
    FILES = "a thread for files that are sent or fetched"


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a route: the right that it requires, and the places in which its answers can run."""

    right: Right
    places: tuple[Place, ...]

    def check(self, holder: Holder | None) -> None:
        """Raises `JobForbidden` unless the holder of a token has the required right."""
        if self.right is Right.UPLOADS and holder is not None:
            check_may(holder, UPLOAD)
        needed = _NAMED.get(self.right)
        if needed is not None and holder is not None:
            is_own = holder.owner is None  # the service's own token
            if not is_own and needed[0] not in (holder.kinds or ()):
                raise JobForbidden(f"the token of {holder.owner!r} is not for {needed[1]}")


def served(right: Right, *places: Place) -> Callable[[F], F]:
    """Returns a decorator that declares an endpoint's terms. `Served` refuses endpoints without terms."""

    def declared(endpoint: F) -> F:
        endpoint.terms = Terms(right, places)  # type: ignore[attr-defined]
        return endpoint

    return declared


def check_may(holder: Holder, kind: str) -> None:
    """Raises `JobForbidden` if the holder of a token may not start jobs of a kind."""
    if holder.kinds is not None and kind not in holder.kinds:
        allowed = ", ".join(sorted(holder.kinds))
        detail = f"the token of {holder.owner!r} starts jobs of kind {allowed}, not {kind!r}"
        raise JobForbidden(detail, kind=kind)


def open_paths(routers: Iterable[APIRouter]) -> frozenset[str]:
    """Returns the paths that need no token."""
    routes = (route for router in routers for route in router.routes)
    return frozenset(
        route.path  # type: ignore[attr-defined]
        for route in routes
        if route.terms.right is Right.PUBLIC  # type: ignore[attr-defined]
    )
