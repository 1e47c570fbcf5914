"""A job worker in its own process, which tests kill, stop and continue: `python -m tests.job_worker`.

The worker runs two kinds of jobs. `hold` writes its process id to the file that the request names, and
returns when the file is deleted. `die` ends the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dormouse.jobs import Progress
from dormouse.postgres import ConnectionSupplier
from tests.working import job_store

LEASE_SECONDS = 3_600.0
"""A lease that is so long that it does not expire on a busy machine; tests expire leases explicitly."""


def hold(request: Any, progress: Progress) -> Any:
    path = Path(request["file"])
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(str(os.getpid()))
    staged.rename(path)
    while path.exists():
        time.sleep(0.005)
    return {"by": os.getpid()}


def die(request: Any, progress: Progress) -> None:
    os._exit(9)


FUNCTIONS = {"hold": hold, "die": die}


@contextmanager
def job_worker(dsn: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a worker process. It runs until it is stopped or killed, and prints its report to stdout."""
    command = [sys.executable, "-m", "tests.job_worker", dsn, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def main() -> None:
    dsn, folder = sys.argv[1:]
    worker = job_store(ConnectionSupplier(dsn), Path(folder)).worker(
        FUNCTIONS, threads=1, lease_seconds=LEASE_SECONDS
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    print(worker.run(), flush=True)


if __name__ == "__main__":
    main()
