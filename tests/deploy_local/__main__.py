"""The command `python -m tests.deploy_local`.

The command prints each step. If a step fails, the command prints the reason in one line and exits with status
1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from tests.deploy_local.processes import RunFailed
from tests.deploy_local.run import EmulatedRun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy_local", description=__doc__)
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs in build/deploy-local")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        EmulatedRun(lambda line: print(line, flush=True), keep_logs=options.keep_logs).all()
    except RunFailed as error:
        print(f"deploy-local failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("deploy-local was interrupted; all processes that it had started are ended", file=sys.stderr)
        return 130
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
