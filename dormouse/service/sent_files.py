"""Bodies of CSV and of any bytes: streamed to a file, bounded, and never a part taken for the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dormouse.service.problems import Refused

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


async def receive(request: Request, target: AbstractContextManager[Path]) -> None:
    """Writes the body to the file that `target` gives, which ends with the error when the body does not."""
    settings = request.app.state.settings
    too_large = Refused(
        "body-too-large",
        f"the body is larger than the {settings.upload_bytes_max:,} bytes that are allowed",
    )
    if int(request.headers.get("content-length", 0)) > settings.upload_bytes_max:
        raise too_large
    path = await asyncio.to_thread(target.__enter__)
    try:
        with path.open("wb") as file:
            size = 0
            chunks = request.stream()
            while (chunk := await _next(chunks, settings.client_stall_seconds_max)) is not None:
                size += len(chunk)
                if size > settings.upload_bytes_max:
                    raise too_large
                await asyncio.to_thread(file.write, chunk)
    except BaseException as error:
        if not await asyncio.to_thread(target.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(target.__exit__, None, None, None)


async def _next(chunks: object, seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(chunks, None)  # type: ignore[call-overload, no-any-return]
    except TimeoutError:
        raise Refused("body-too-slow", f"nothing of the body came for {seconds:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400) from None  # which only the log hears
