"""A real account of AWS: the credentials of the environment, and a database behind Session Manager."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import dormouse as dm
from dormouse.aws.instance import access, find
from dormouse.aws.instance import environment as variables_of
from dormouse.aws.switches import rule_name
from dormouse.settings.config_file import load
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import RunResources, ScheduledResources
from tests.deploy_local.account import ROOT, Account, Person, deploying, words_of_session
from tests.deploy_local.processes import Background, RunFailed
from tests.support.api import Instance
from tests.support.aws import Aws, DeployedInstance

BASE = ROOT / "config" / "minimal.toml"
ADDED = Path(__file__).with_name("real.toml")
PROGRAMS = ("aws", "session-manager-plugin")
SESSION_SECONDS_MAX = 900.0
"""The time until a session opens. The agent of a new host needs a minute or two."""

SESSION_POLL_SECONDS = 5.0
LOGS_OF_RUNS = "logs/emr/"
BUDGET = "dormouse-e2e"


def write_settings(target: Path, instance_id: str, base: Path = BASE) -> DeploymentSettings:
    """Writes the settings of `base` with another id, and with each table of real.toml that they lack.

    Raises RunFailed if the instance would be protected, because a run must be able to destroy it.
    """
    load(base)  # its mistakes are reported with its own name
    text = base.read_text("utf-8")
    known = tomllib.loads(text)
    named, count = re.subn(r"(?m)^id *=.*$", f'id = "{instance_id}"', text, count=1)
    if count != 1:
        raise RunFailed(f"{base} has no line with the id of the instance")
    tables = re.split(r"(?m)^(?=\[)", ADDED.read_text("utf-8"))[1:]
    missing = [table for table in tables if table[1 : table.index("]")] not in known]
    target.write_text("\n".join((named, *missing)), "utf-8")
    settings = load(target)
    if settings.protected:
        raise RunFailed(f"{base} has protected = true, so a run could not destroy the instance")
    return settings


class RealAccount(Account):
    """The account of the environment's credentials, which may have other things in it."""

    is_emulated = False
    command_seconds_max, wait_seconds_max, poll_seconds = 7_200.0, 1_800.0, 10.0

    def __init__(self, work: Path, logs: Path, *, instance_id: str, region: str) -> None:
        super().__init__(work, logs)
        self.instance_id, self.region = instance_id, region

    @cached_property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **deploying(self.region)}

    @property
    def settings(self) -> Path:
        return self.work / "real.toml"

    @property
    def app(self) -> tuple[str, ...]:
        return "-c", f"config={self.settings}", "--output", str(self.work / "cdk.out")

    @property
    def destroy_variables(self) -> Mapping[str, str]:
        return {}

    def person(self, _name: str) -> Person:
        """Returns no variables: every command runs with the credentials of the environment."""
        return {}

    def fire(self, part: ScheduledResources | RunResources) -> None:
        if self.client("events").describe_rule(Name=rule_name(part.rules[0]))["State"] != "ENABLED":
            return
        if isinstance(part, RunResources) and part.state_machine is not None:
            self.client("stepfunctions").start_execution(stateMachineArn=part.state_machine, input="{}")
        else:
            self.client("lambda").invoke(FunctionName=part.function, InvocationType="Event", Payload=b"{}")

    def meanwhile(self) -> None:
        """Does nothing: time passes by itself."""

    def leave(self) -> None:
        """Keeps the logs, which a destroy deletes."""
        with suppress(Exception):
            self.keep_service_logs()

    @contextmanager
    def forwarded(self, command: str) -> Iterator[str]:
        """Runs the command, again until its port is open: the agent of a new host is not there at once."""
        words = words_of_session(command)
        parameters = json.loads(words[words.index("--parameters") + 1])
        address = ("127.0.0.1", int(parameters["localPortNumber"][0]))
        if _is_open(address):
            raise RunFailed(f"port {address[1]} of this machine is in use, and a session needs it")
        deadline = time.monotonic() + SESSION_SECONDS_MAX
        session = Background("session", words, self.environment, self.logs)
        try:
            while not _is_open(address):
                if time.monotonic() > deadline:
                    raise RunFailed(f"no session after {SESSION_SECONDS_MAX:g} s: {session.last_words}")
                time.sleep(SESSION_POLL_SECONDS)
                if session.is_over:
                    session = Background("session", words, self.environment, self.logs)
            yield address[0]
        finally:
            session.stop()

    def trusting(self, dsn: str, _address: str) -> str:
        """Returns the DSN as it is: its address is this machine's, and its authority is Amazon's."""
        return dsn

    @contextmanager
    def opened(self, deployed: DeployedInstance) -> Iterator[Instance]:
        """Opens the instance by a session of its own, because a session ends after 20 minutes without use.

        The host is another one after a resume, so it is looked up each time.
        """
        command = access(find(self.instance_id, self.session)).command
        with self.forwarded(command):
            variables = variables_of(deployed, "dormouse_owner", forwarded=True)
            os.environ.update(variables)
            staging = str(self.work / "staging")
            with dm.connect(
                variables["DORMOUSE_DSN"], variables["DORMOUSE_OBJECTS"], staging_dir=staging
            ) as instance:
                yield instance

    @property
    def architecture(self) -> str:
        return load(self.settings).architecture

    def confirm(self, account: str, *, is_new: bool = True) -> str:
        """Raises RunFailed unless the credentials are of this account, and no such instance is in it.

        Without `is_new`, the instance may exist.
        """
        found = Aws(self.session).account
        if found != account:
            raise RunFailed(f"the credentials are of the account {found}, not {account}: nothing was done")
        if is_new and (stacks := [one["StackName"] for one in self.stacks()]):
            raise RunFailed(
                f"there are stacks of an instance {self.instance_id} already ({', '.join(stacks)}): choose "
                f"another --instance, or end it with --destroy-only"
            )
        return f"account {found}, {self.region}"

    def check_programs(self) -> None:
        """Raises RunFailed, with the name, if a program for sessions is missing."""
        for name in PROGRAMS:
            if shutil.which(name) is None:
                raise RunFailed(f"{name} is missing: install the AWS CLI and its Session Manager plugin")

    def keep_budget(self, account: str, usd: float, email: str | None) -> str:
        """Makes the account's budget for runs if it is missing. Raises RunFailed if the month is over it.

        AWS counts costs some hours late, so the budget stops a series of runs, and not one run.
        """
        budgets = self.client("budgets")
        try:
            found = budgets.describe_budget(AccountId=account, BudgetName=BUDGET)["Budget"]
        except budgets.exceptions.NotFoundException:
            budget: dict[str, Any] = {"BudgetName": BUDGET, "BudgetType": "COST", "TimeUnit": "MONTHLY"}
            budget["BudgetLimit"] = {"Amount": f"{usd:g}", "Unit": "USD"}
            budgets.create_budget(
                AccountId=account, Budget=budget, NotificationsWithSubscribers=_notices(email)
            )
            return f"{BUDGET} is made, of {usd:g} USD a month"
        limit, spent = float(found["BudgetLimit"]["Amount"]), _spent(found)
        if spent >= limit:
            raise RunFailed(f"the budget {BUDGET} is spent: {spent:g} USD of {limit:g} this month")
        return f"{spent:g} USD of {limit:g} are spent this month"

    def keep_service_logs(self) -> None:
        """Copies these logs, and those of Spark's drivers from the bucket."""
        super().keep_service_logs()
        storage = find(self.instance_id, self.session).resources.storage
        if storage is None:
            return
        s3 = self.client("s3")
        where = {"Bucket": storage.data_bucket, "Prefix": LOGS_OF_RUNS}
        for page in s3.get_paginator("list_objects_v2").paginate(**where):
            for one in page.get("Contents", ()):
                if "SPARK_DRIVER" in one["Key"]:
                    name = one["Key"].removeprefix(LOGS_OF_RUNS).replace("/", "-")
                    s3.download_file(storage.data_bucket, one["Key"], str(self.logs / name))


def _spent(budget: Mapping[str, Any]) -> float:
    return float(budget.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0))


def _notices(email: str | None) -> list[dict[str, Any]]:
    """Returns a notice by e-mail for a budget that is spent, or none."""
    when = {"NotificationType": "ACTUAL", "ComparisonOperator": "GREATER_THAN", "Threshold": 100.0}
    to = [{"SubscriptionType": "EMAIL", "Address": email}]
    return [{"Notification": when, "Subscribers": to}] if email else []


def _is_open(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout=5):
        return True
    return False
