"""Whether the process answers, and whether it can answer queries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dormouse.errors import DormouseError, InstanceError

SECONDS_MAX = 5.0

logger = logging.getLogger("dormouse.service")


class Readiness:
    """Asks the database and the object store in a thread; requests that come meanwhile share the answer."""

    def __init__(self, check: Callable[[], None], seconds_max: float = SECONDS_MAX) -> None:
        self._check = check
        self._seconds_max = seconds_max
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dormouse-ready")
        self._pending: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Raises `InstanceError`, or what the check raised."""
        if self._pending is None or self._pending.done():
            self._pending = asyncio.get_running_loop().run_in_executor(self._thread, self._check)
            self._pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait_for(asyncio.shield(self._pending), self._seconds_max)
        except TimeoutError:
            raise InstanceError(
                f"the database or the object store did not answer within {self._seconds_max:g} s"
            ) from None
        except DormouseError:
            raise
        except Exception:
            logger.exception("the readiness check failed")
            raise InstanceError("the database or the object store did not answer as expected") from None

    def close(self) -> None:
        self._thread.shutdown(wait=False)
