"""A run, step by step. Each step prints its result and its duration."""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dormouse.errors import DormouseError
from tests.deploy_local import packages
from tests.deploy_local.account import ROOT, Account
from tests.deploy_local.cloud import ACCOUNT, REGION, Cloud, left_behind
from tests.deploy_local.processes import RunFailed
from tests.deploy_local.steps import Deployment, steps_in

FOLDER = "dormouse-deploy-"
KEPT_LOGS = ROOT / "build" / "deploy-local"
LEFT_SECONDS_MAX = 10.0


class Run(ABC):
    """A run of all steps by `all()`. At its end, even after an error, only the logs of a failure remain."""

    def __init__(self, say: Callable[[str], None], *, keep_logs: bool = False) -> None:
        self._say = say
        self._keep_logs = keep_logs
        self._began = time.monotonic()
        self._failed = "begin"

    @abstractmethod
    def _account(self, work: Path, logs: Path) -> Account:
        """Returns the account. Nothing is started in it yet."""

    @abstractmethod
    def _begin(self, account: Account) -> None:
        """Does what precedes the steps."""

    @abstractmethod
    def _end(self, account: Account) -> None:
        """Ends what the run has started, after the steps or after the first that fails."""

    def all(self) -> None:
        """Runs all steps. Raises RunFailed with the step, the fault and the folder of the logs."""
        self._in_folder(self._in)

    def _in_folder(self, do: Callable[[Account], None]) -> None:
        """Calls `do` with the account and a new folder, which is deleted at the end."""
        work = Path(tempfile.mkdtemp(prefix=FOLDER))
        logs = work / "logs"
        logs.mkdir()
        place = KEPT_LOGS / work.name
        try:
            do(self._account(work, logs))
            if self._keep_logs:
                shutil.copytree(logs, place)
        except KeyboardInterrupt:
            if self._keep_logs:
                shutil.copytree(logs, place)
            shutil.rmtree(work, ignore_errors=True)
            _check_nothing_left(work)
            raise
        except Exception as error:
            shutil.copytree(logs, place)
            raise RunFailed(f"{self._failed}: {one_line(error)} (logs in {place})") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.step("nothing is left behind", lambda: _check_nothing_left(work))

    def step(self, name: str, do: Callable[[], object]) -> object:
        began = time.monotonic()
        try:
            result = do()
        except BaseException as error:
            self._failed = name
            self._say(f"{name} failed: {one_line(error)}")
            raise
        took, since = time.monotonic() - began, time.monotonic() - self._began
        more = f": {result}" if isinstance(result, str) else ""
        self._say(f"[{since:5.0f} s] {name}{more} ({took:.1f} s)")
        return result

    def _in(self, account: Account) -> None:
        try:
            self._begin(account)
            deployment = Deployment(account)
            for step in steps_in(type(account)):
                self.step(step.name, lambda do=step.do: do(deployment))  # type: ignore[misc]
        finally:
            self._end(account)


class EmulatedRun(Run):
    """A run in an emulator on this machine."""

    def _account(self, work: Path, logs: Path) -> Cloud:
        return Cloud(work, logs)

    def _begin(self, account: Account) -> None:
        assert isinstance(account, Cloud)
        logs = account.logs
        self.step("install the emulator", lambda: packages.install_emulator(logs))
        self.step("install the CDK CLI", lambda: packages.install_cdk(logs))
        self.step("build the lambda packages", lambda: packages.build_lambdas(logs))
        self.step("the runtime has what binaries need", packages.check_binaries)
        self.step("start AWS, EMR Serverless and PostgreSQL on loopback", account.start)
        packages.copy_packages(account.work / "checkout", account.database.certificates)
        packages.write_settings(account.settings)
        self.step("cdk bootstrap", lambda: account.cdk("bootstrap", f"aws://{ACCOUNT}/{REGION}"))

    def _end(self, account: Account) -> None:
        assert isinstance(account, Cloud)
        with suppress(Exception):
            account.keep_service_logs()
        account.stop()


def _check_nothing_left(work: Path) -> None:
    deadline = time.monotonic() + LEFT_SECONDS_MAX
    while left := list(left_behind(work)):
        if time.monotonic() > deadline:
            raise RunFailed(f"the run left {'; '.join(left)}")
        time.sleep(0.2)


def one_line(error: BaseException) -> str:
    """Returns an error as one line, with its class unless it was worded for people."""
    text = " ".join(str(error).split())
    return text if isinstance(error, RunFailed | DormouseError) else f"{type(error).__name__}: {text}"
