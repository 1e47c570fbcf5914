"""Libraries with threads of their own do not survive a fork: the child would wait for them forever."""

from __future__ import annotations

import os

from dormouse.errors import DormouseError


class ForkGuard:
    """Refuses a library in a child that was forked after its parent had used it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._used = False
        self._lost = False
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def check(self) -> None:
        """Call it before the library is used."""
        if self._lost:
            raise DormouseError(
                f"this process was forked after its parent had used {self._what}, which does not survive a "
                "fork; start it with the spawn start method: multiprocessing.get_context('spawn')"
            )
        self._used = True

    def _after_fork_in_child(self) -> None:
        self._lost = self._used
