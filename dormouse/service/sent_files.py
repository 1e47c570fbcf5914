"""Bodies of CSV and of any bytes: streamed to a file, bounded, and never a part taken for the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from dormouse.service.problems import Refused
from dormouse.service.running import Answer, disconnected
from dormouse.service.terms import Place
from dormouse.service.work import Work

T = TypeVar("T")
MEDIA_TYPES = frozenset({"text/csv", "text/tab-separated-values"})


def separator_of(request: Request) -> str:
    """What the media type of a body says of its cells; `Refused` for one that is no CSV."""
    return "," if check_media_type(request, MEDIA_TYPES) == "text/csv" else "\t"


def check_media_type(request: Request, allowed: Collection[str]) -> str:
    """That of a body that comes as it is; `Refused` for another.

    None that a form can send is allowed: a browser asks for permission before other sites' pages send these.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in allowed:
        raise Refused("unsupported-media-type", f"the body must be {' or '.join(sorted(allowed))}")
    if request.headers.get("content-encoding", "").strip().lower() not in {"", "identity"}:
        raise Refused("unsupported-media-type", "the body must come as it is, without content-encoding")
    return media_type


@dataclass
class Reception:
    """How a body is received. Each function runs in a thread of the request's slot.

    `prepare` checks the request before any of its body is read. `target` gives the path to write the body to,
    and ends with the error when the body breaks off. `digest` is then that of the body.
    """

    prepare: Callable[[], object]
    target: Callable[[], AbstractContextManager[Path]]
    digest: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    def write(self, file: IO[bytes], chunk: bytes) -> None:
        """Writes a piece of the body."""
        file.write(chunk)
        self.digest.update(chunk)


class Sent(Answer):
    """The answer to a body that is received as a file first. One slot is held for both."""

    def __init__(self, request: Request, reception: Reception, work: Work) -> None:
        super().__init__(Place.FILES, None, work)
        self._request = request
        self._reception = reception
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: asyncio.Future[Any] | None = None

    @property
    def _seconds_max(self) -> float:
        return self.runner.settings.seconds_max

    def _watched(self, receive: Receive) -> asyncio.Future[None]:
        """Returns a future that is done when the client has gone; nothing looks for that amid the body."""
        return self._gone

    async def _admitted(self, gone: asyncio.Future[None]) -> None:
        """Takes a slot and receives the body; gives the slot back when that fails."""
        size = int(self._request.headers.get("content-length", 0))
        self._check_size(size)
        await super()._admitted(gone)
        seconds = self.runner.seconds_max
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._receive()
        except BaseException as error:
            self._free()
            if isinstance(error, TimeoutError) and limit.expired():
                raise Refused("body-too-slow", f"the body did not come within {seconds:g} s") from None
            raise

    async def _receive(self) -> None:
        await self._in_thread(self._reception.prepare)
        target = await self._in_thread(self._reception.target)
        path = await self._in_thread(target.__enter__)
        try:
            await self._write(path)
        except BaseException as error:
            if not await self._in_thread(target.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await self._in_thread(target.__exit__, None, None, None)
        watching = asyncio.ensure_future(disconnected(self._request.receive))
        watching.add_done_callback(self._has_gone)
        self._gone.add_done_callback(lambda _: watching.cancel())

    def _has_gone(self, watching: asyncio.Future[None]) -> None:
        if not watching.cancelled() and not self._gone.done():
            self._gone.set_result(None)

    async def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            size = 0
            chunks = self._request.stream()
            stall = self.runner.settings.client_stall_seconds_max
            while (chunk := await _next(chunks, stall)) is not None:
                size += len(chunk)
                self._check_size(size)
                await self._in_thread(self._reception.write, file, chunk)

    def _check_size(self, size: int) -> None:
        most = self._request.app.state.settings.upload_bytes_max
        if size > most:
            raise Refused("body-too-large", f"the body is larger than the {most:,} bytes that are allowed")

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        self._last = found = self.runner.in_thread(function, *arguments)
        return found

    def _free(self) -> None:
        """Gives the slot back when its thread has ended."""
        if self._last is None or self._last.done():
            self.runner.slots.give_back()
        else:
            self.runner.free(self._last)


async def _next(chunks: object, seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(chunks, None)  # type: ignore[call-overload, no-any-return]
    except TimeoutError:
        raise Refused("body-too-slow", f"nothing of the body came for {seconds:g} s") from None
    except ClientDisconnect:
        raise Refused("body-broken-off", "the body broke off") from None  # which only the log hears
