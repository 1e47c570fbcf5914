"""A run in a real account. It asks for the account by its number, and always destroys what it deployed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dormouse.aws.cost import HOURS, Assumptions, estimate
from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings
from tests.deploy_local import packages, steps
from tests.deploy_local.account import Account
from tests.deploy_local.processes import RunFailed
from tests.deploy_local.real_account import BASE, RealAccount, write_settings
from tests.deploy_local.run import Run, one_line

DESTROYS_MAX = 2
"""The number of times that the end of a run tries to destroy the instance."""

EMR_HOURS = 0.25
BUILD_MINUTES = 10.0


@dataclass(frozen=True)
class Wanted:
    """The account and the instance of a run, as the command line names them."""

    account: str
    """The number of the account, to be sure that it is the right one."""

    region: str
    instance_id: str
    config: Path = BASE
    budget_usd: float = 50.0
    budget_email: str | None = None

    def again(self, option: str) -> str:
        """Returns the command for the same instance with another option."""
        return (
            f"python -m tests.deploy_local --real --account {self.account} --region {self.region} "
            f"--instance {self.instance_id} --config {self.config} {option}"
        )


class RealRun(Run):
    """A run in a real account."""

    def __init__(self, say: Callable[[str], None], wanted: Wanted, *, keep_logs: bool = False) -> None:
        super().__init__(say, keep_logs=keep_logs)
        self._wanted = wanted
        self._is_ours = False

    def _account(self, work: Path, logs: Path) -> RealAccount:
        wanted = self._wanted
        return RealAccount(work, logs, instance_id=wanted.instance_id, region=wanted.region)

    def _begin(self, account: Account) -> None:
        assert isinstance(account, RealAccount)
        wanted, logs = self._wanted, account.logs
        write_settings(account.settings, wanted.instance_id, wanted.config)
        self.step("the account is the right one", lambda: account.confirm(wanted.account))
        self.step("programs for sessions", account.check_programs)
        budget = (wanted.account, wanted.budget_usd, wanted.budget_email)
        self.step("the budget", lambda: account.keep_budget(*budget))
        self.step("install the CDK CLI", lambda: packages.install_cdk(logs))
        self.step("build the packages", lambda: packages.build_all(logs, account.architecture))
        self.step("dormouse doctor", lambda: _examine(account))
        self._is_ours = True

    def _end(self, account: Account) -> None:
        """Destroys the instance, unless the run was refused before it deployed anything."""
        if self._is_ours:
            self.step("nothing is left in the account", lambda: destroy_all(account, self._wanted))

    def only_destroy(self) -> None:
        """Destroys the instance, if there is one."""
        self._in_folder(self._destroy)

    def _destroy(self, account: Account) -> None:
        assert isinstance(account, RealAccount)
        wanted = self._wanted
        write_settings(account.settings, wanted.instance_id, wanted.config)
        self.step("the account is the right one", lambda: account.confirm(wanted.account, is_new=False))
        self.step("install the CDK CLI", lambda: packages.install_cdk(account.logs))
        self.step("nothing is left in the account", lambda: destroy_all(account, wanted))


def destroy_all(account: Account, wanted: Wanted) -> str:
    """Destroys the instance if any of its stacks exists. Raises RunFailed if some stay."""
    if not account.stacks():
        return "there is no stack of the instance"
    errors = []
    for _ in range(DESTROYS_MAX):
        try:
            steps.destroy(account)
        except RunFailed as error:
            errors.append(one_line(error))
        if not account.stacks():
            return "all stacks are deleted"
    raise RunFailed(
        f"the instance {wanted.instance_id} is not destroyed, and costs money: {errors[-1]}. Try "
        f"{wanted.again('--destroy-only')}"
    )


def _examine(account: RealAccount) -> str:
    """Raises RunFailed for each problem that `dormouse doctor` finds, and each right that it lacks."""
    given = ("--config", str(account.settings), "--region", account.region, "--json")
    checks = json.loads(account.dormouse("doctor", *given, accept=(0, 1)))["checks"]
    bad = [one for one in checks if one["result"] == "wrong" or one["found"].startswith("not checked")]
    if bad:
        raise RunFailed("; ".join(f"{one['name']}: {one['found']} ({one['mend']})" for one in bad))
    return f"{len(checks)} checks"


def plan(wanted: Wanted, work: Path) -> Iterator[str]:
    """Yields the lines of a dry run: the steps with their times, and what they cost. It calls nothing."""
    settings = write_settings(work / "real.toml", wanted.instance_id, wanted.config)
    todo = steps.steps_in(RealAccount)
    yield f"instance {settings.id}, account {wanted.account}, {wanted.region}"
    for step in todo:
        yield f"{step.minutes:5g} min  {step.name}"
    minutes = BUILD_MINUTES + sum(step.minutes for step in todo)
    yield f"about {minutes:.0f} minutes in all, with the build; these are estimates, not measurements"
    try:
        yield f"about {usd(settings, wanted.region, minutes / 60):.2f} USD, as dormouse cost has the prices"
    except InvalidInput as error:
        yield f"its cost is not known: {error}"


def usd(settings: DeploymentSettings, region: str, hours: float) -> float:
    """Returns the cost of a run: its share of a month that consists of such runs only."""
    used = Assumptions(
        requests_million=0.01,
        data_gb=0.1,
        database_gb=1.0,
        load=0.5,
        run_hours=EMR_HOURS * HOURS / hours,
        run_share=1.0,
        log_gb=HOURS / hours * 0.05,
    )
    return estimate(settings, region, used).running * hours / HOURS
