"""The command `python -m tests.deploy_local`: a deployment in an emulator, or with --real in AWS.

The command prints each step. If a step fails, the command prints the reason in one line and exits with status
1. A real run destroys what it has deployed, whatever fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dormouse.errors import DormouseError
from tests.deploy_local.processes import RunFailed
from tests.deploy_local.real import RealRun, Wanted, plan
from tests.deploy_local.real_account import BASE
from tests.deploy_local.run import EmulatedRun, Run

REQUIRED = ("account", "region", "instance")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.deploy_local", description=__doc__)
    options.add_argument("--keep-logs", action="store_true", help="keep the logs in build/deploy-local")
    options.add_argument("--real", action="store_true", help="deploy into the account of the credentials")
    real = options.add_argument_group("with --real")
    real.add_argument("--account", help="the number of the account; a run in any other is refused")
    real.add_argument("--region", help="the region")
    real.add_argument("--instance", help="the id of a new instance, 2 to 20 of a-z, 0-9 and -")
    real.add_argument("--config", type=Path, default=BASE, help="its settings [config/minimal.toml]")
    real.add_argument("--budget-usd", type=float, default=50.0, help="the account's budget of a month [50]")
    real.add_argument("--budget-email", help="the address for a notice that the budget is spent")
    real.add_argument("--dry-run", action="store_true", help="print the steps and the cost, and call nothing")
    real.add_argument("--destroy-only", action="store_true", help="destroy what an earlier run has left")
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = parser().parse_args(given)
    missing = [f"--{name}" for name in REQUIRED if options.real and not getattr(options, name)]
    if missing:
        print(f"--real needs {', '.join(missing)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run(options)
    except (RunFailed, DormouseError) as error:
        print(f"deploy-local failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("deploy-local was interrupted; all processes that it had started are ended", file=sys.stderr)
        if options.real:
            print(f"if stacks are left: {_wanted(options).again('--destroy-only')}", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    def say(line: str) -> None:
        print(line, flush=True)

    run: Run
    if not options.real:
        run = EmulatedRun(say, keep_logs=options.keep_logs)
        run.all()
        return
    wanted = _wanted(options)
    run = RealRun(say, wanted, keep_logs=options.keep_logs)
    if options.dry_run:
        with tempfile.TemporaryDirectory() as work:
            for line in plan(wanted, Path(work)):
                say(line)
    elif options.destroy_only:
        run.only_destroy()
    else:
        run.all()


def _wanted(options: argparse.Namespace) -> Wanted:
    budget = options.budget_usd, options.budget_email
    return Wanted(options.account, options.region, options.instance, options.config, *budget)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
