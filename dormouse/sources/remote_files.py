"""What is not a file of this machine: standard input, and objects by URL, copied to be read as files are."""

from __future__ import annotations

import fnmatch
import ipaddress
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from dormouse.errors import InvalidData, InvalidName, ObjectStoreError, one_line
from dormouse.objects import open_store

TIMEOUT_SECONDS = 60
_COPY_BYTES = 1024 * 1024
_GLOB = set("*?[")
IsData = Callable[[str, int], bool]
"""Given a name, and how many parts of it were asked for as they are."""


class Staged:
    """A folder that goes with the last that holds it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dormouse-"))
        weakref.finalize(self, shutil.rmtree, str(self.folder), ignore_errors=True)

    def __reduce__(self) -> Any:
        # the process that made it keeps it
        return type(None), ()


def staged(text: str, is_data: IsData) -> Iterator[tuple[Path, str, Staged]]:
    """Copies of what "-" or a URL names: each path here, what it is called, and what keeps it.

    Of a folder or a pattern of objects those that `is_data` knows by their names.
    """
    scheme = urlsplit(text).scheme.lower()
    if text == "-":
        keeper = Staged()
        path = keeper.folder / "stdin"
        with path.open("wb") as target:
            shutil.copyfileobj(sys.stdin.buffer, target, _COPY_BYTES)
        yield path, "standard input", keeper
    elif scheme == "file":
        yield Path(unquote(urlsplit(text).path)), unquote(urlsplit(text).path), Staged()
    elif scheme == "s3":
        yield from _objects(text, is_data)
    elif scheme in {"https", "http"}:
        yield _downloaded(text)
    else:
        raise InvalidData(f"{text!r}: give a path, - for standard input, or a URL of https:// or s3://")


def _objects(url: str, is_data: IsData) -> Iterator[tuple[Path, str, Staged]]:
    """The object of this name, those that a pattern matches, or those below a folder."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    pattern = next((number for number, sign in enumerate(key) if sign in _GLOB), None)
    prefix = (key if pattern is None else key[:pattern]).rpartition("/")[0]
    try:
        store = open_store(f"s3://{bucket}")
        if pattern is None and is_data(key, len(Path(key).parts)):
            names = [key]
        else:
            folder = prefix if pattern is not None else key.rstrip("/")
            found = [name for name, _ in store.list(folder)]
            names = sorted(
                name
                for name in found
                if is_data(name, len(Path(folder).parts))
                and (pattern is None or _is_like(name.split("/"), key.split("/")))
            )
        if not names:
            raise InvalidData(f"{url!r} names no objects that are .parquet, .csv, .tsv or .jsonl")
        for name in names:
            keeper = Staged()
            path = keeper.folder / Path(name).name
            with store.reader(name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            yield path, f"s3://{bucket}/{name}", keeper
    except (ObjectStoreError, InvalidName) as error:
        raise InvalidData(f"{url!r} cannot be read: {one_line(error)}") from None


def _is_like(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a name is of a pattern as of paths: `*` is within a part, `**` any number of parts."""
    if not wanted or not parts:
        return not parts and all(one == "**" for one in wanted)
    if wanted[0] == "**":
        return _is_like(parts, wanted[1:]) or _is_like(parts[1:], wanted)
    return fnmatch.fnmatchcase(parts[0], wanted[0]) and _is_like(parts[1:], wanted[1:])


class _Redirects(urllib.request.HTTPRedirectHandler):
    """None from the open to what is private: a stranger's server must not have us ask our own network."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https" and urlsplit(req.full_url).scheme == "https":
            raise InvalidData(f"{req.full_url!r} redirects to {newurl!r}, which is not https://")
        if is_private(newurl) and not is_private(req.full_url):
            raise InvalidData(f"{req.full_url!r} redirects to {newurl!r}, which is a private address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_private(url: str) -> bool:
    """Whether any address of the host is of no public network; what has no address is not."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_global for one in found)


def _downloaded(url: str) -> tuple[Path, str, Staged]:
    keeper = Staged()
    name = Path(unquote(urlsplit(url).path)).name or "download"
    path = keeper.folder / name
    request = urllib.request.Request(url, headers={"User-Agent": "dormouse"})  # noqa: S310  # checked above
    try:
        opener = urllib.request.build_opener(_Redirects)
        with opener.open(request, timeout=TIMEOUT_SECONDS) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            expected = source.headers.get("Content-Length")
    except urllib.error.HTTPError as error:
        raise InvalidData(f"{url!r} cannot be read: the server says {error.code} {error.reason}") from None
    except (OSError, ValueError, HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise InvalidData(f"{url!r} cannot be read: {one_line(Exception(str(why)))}") from None
    if expected is not None and int(expected) != path.stat().st_size:
        raise InvalidData(f"{url!r} ended before its end: {path.stat().st_size:,} of {int(expected):,} bytes")
    return path, url, keeper
