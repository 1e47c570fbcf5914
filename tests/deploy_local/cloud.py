"""The emulated account: processes for AWS, EMR Serverless and Aurora on loopback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import dormouse as dm
from dormouse.aws.instance import environment as variables_of
from dormouse.aws.switches import rule_name
from dormouse.settings.resources import RunResources, ScheduledResources
from packages import LAMBDA, interpreter
from tests.deploy_local import forwarding, people
from tests.deploy_local.account import BIN, ROOT, Account, Person, deploying, words_of_session
from tests.deploy_local.database import PORT, Database, ask, free_address
from tests.deploy_local.processes import Background, free_port, interruptions_wait
from tests.support.api import Instance
from tests.support.aws import DeployedInstance

ACCOUNT, REGION = "000000000000", "eu-west-1"
EMULATOR_PYTHON = ROOT / ".venv-emulator" / "bin" / "python"
SECONDS_MAX = 1_200.0
"""The limit of one command. A deploy takes a minute on two idle cores, and much longer on busy ones."""

WAITS_SCALE = 0.05
"""The factor by which the waits of state machines are multiplied."""


class Cloud(Account):
    """The processes that emulate AWS, which run from `start` to `stop`. Nothing else is in their account."""

    is_emulated = True
    instance_id, region = "local", REGION
    command_seconds_max, wait_seconds_max, poll_seconds = SECONDS_MAX, 180.0, 0.5

    def __init__(self, work: Path, logs: Path) -> None:
        super().__init__(work, logs)
        self._ports = {name: free_port() for name in ("aws", "control", "emr")}
        self._running, self._visit = ExitStack(), ExitStack()
        self.database = Database(work / "database", self.url("control"))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def start(self) -> None:
        """Starts all processes. If one fails to start, `stop` still ends the others."""
        with interruptions_wait():
            self._running.enter_context(self.database)
            emr = Background("emr", self._moto, self._bare_environment, self.logs)
            self._running.callback(emr.stop)
            command = [str(EMULATOR_PYTHON), "-m", "tests.deploy_local.emulator"]
            emulator = Background("emulator", command, self._emulator_environment, self.logs)
            self._running.callback(emulator.stop)
        emr.wait_for(f"{self.url('emr')}/moto-api/")
        emulator.wait_for(f"{self.url('aws')}/_ministack/health")

    def stop(self) -> None:
        try:
            self._visit.close()
        finally:
            self._running.close()

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment variables for deploying: the account's credentials, services on loopback."""
        return {
            **self._bare_environment,
            **deploying(REGION),
            "AWS_ENDPOINT_URL": self.url("aws"),
            "AWS_ENDPOINT_URL_EMR_SERVERLESS": self.url("emr"),
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(Path.home() / ".cache/aws/jsii/package-cache"),
        }

    @property
    def settings(self) -> Path:
        return self.work / "local.toml"

    @property
    def app(self) -> tuple[str, ...]:
        command = f"{sys.executable} -m tests.deploy_local.app {self.work}"
        return "--app", command, "--output", self._assembly

    @property
    def synthesized(self) -> tuple[str, ...]:
        """The arguments for what the last command with `app` synthesized. A synthesis takes seconds."""
        return "--app", self._assembly

    @property
    def destroy_variables(self) -> Mapping[str, str]:
        # The deployed assembly: the app that cdk.json names would make another one.
        return {"CDK_APP": self._assembly}

    @property
    def _assembly(self) -> str:
        return str(self.work / "cdk.out")

    def person(self, name: str) -> Person:
        """Creates an IAM user with the managed policy of this name, and no other right."""
        return people.arrive(self, name)

    def fire(self, part: ScheduledResources | RunResources) -> None:
        self.ask("/schedule", rule=rule_name(part.rules[0]))

    def meanwhile(self) -> None:
        """Ends all visibility timeouts, so that no wait takes as long as in AWS."""
        self.ask("/time")

    @contextmanager
    def forwarded(self, command: str) -> Iterator[str]:
        words_of_session(command)
        address = free_address(PORT)
        with forwarding.forwarded(address, self.database.host, PORT):
            yield address

    def trusting(self, dsn: str, address: str) -> str:
        # The variables name 127.0.0.1, as on a laptop; the run forwards from another loopback address.
        moved = dsn.replace("hostaddr=127.0.0.1", f"hostaddr={address}")
        return f"{moved}&sslrootcert={self.database.certificates}"

    def opened(self, deployed: DeployedInstance) -> AbstractContextManager[Instance]:
        """Opens the instance once: after the failed migration, its schema is too new to open it again."""
        return nullcontext(self._instance(deployed))

    def leave(self) -> None:
        self.keep_service_logs()
        self._visit.close()
        people.leave(self)

    def _instance(self, deployed: DeployedInstance) -> Instance:
        if "_opened" not in self.__dict__:
            variables = variables_of(deployed, "dormouse_owner")
            dsn = f"{variables.pop('DORMOUSE_DSN')}&sslrootcert={self.database.certificates}"
            os.environ.update(variables)
            staging = str(self.work / "staging")
            instance = dm.connect(dsn, variables["DORMOUSE_OBJECTS"], staging_dir=staging)
            self._opened = self._visit.enter_context(instance)
        return self._opened

    def ask(self, path: str, **parameters: Any) -> dict[str, Any]:
        """Sends a request to the emulator's control port and returns the answer."""
        return ask(self.url("control"), path, **parameters)

    @property
    def _moto(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._ports["emr"])]

    @property
    def _bare_environment(self) -> dict[str, str]:
        """The environment variables without the user's credentials, profiles and caches."""
        return {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.work),
            "TMPDIR": str(self.work),
            "LANG": "C.UTF-8",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_EC2_METADATA_DISABLED": "true",
            "MOTO_ACCOUNT_ID": ACCOUNT,
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def _emulator_environment(self) -> Mapping[str, str]:
        return {
            **self._bare_environment,
            "AUTH": "true",  # roles may do what their policies say, and no more
            "AWS_ENDPOINT_URL_EMR_SERVERLESS": self.url("emr"),
            "BIND_HOST": "127.0.0.1",
            "CONTROL_PORT": str(self._ports["control"]),
            "DATABASE_HOST": self.database.host,
            "DATABASE_PORT": str(PORT),
            "GATEWAY_PORT": str(self._ports["aws"]),
            "IOT_MTLS_ENABLED": "0",
            "LAMBDA_PYTHON": str(interpreter(LAMBDA)),
            "LAMBDA_RUNTIME": f"python{LAMBDA.python}",
            "MINISTACK_ACCOUNT_ID": ACCOUNT,
            "MINISTACK_HOST": "127.0.0.1",
            "MINISTACK_REGION": REGION,
            "SFN_WAIT_SCALE": str(WAITS_SCALE),
            "SFTP_ENABLED": "0",
        }


def left_behind(work: Path) -> Iterator[str]:
    """Yields the remains of a run: its folder, and processes whose arguments or variables name the folder."""
    import psutil

    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        known = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(work) in text for text in known):
            yield f"process {process.pid}: {' '.join(process.info['cmdline'] or ())[:80]}"
    if work.exists():
        yield f"folder {work}"
