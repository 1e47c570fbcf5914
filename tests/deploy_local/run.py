"""The run, step by step. Each step prints its result and its duration."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import dormouse as dm
from dormouse.aws.instance import environment, find
from dormouse.settings.resources import Resources
from tests.deploy_local import access, commits, operations, packages, people
from tests.deploy_local.cloud import ACCOUNT, REGION, ROOT, Cloud, left_behind
from tests.deploy_local.processes import RunFailed, sign
from tests.deploy_local.strangers import check_refused
from tests.support.api import Instance
from tests.support.aws import DeployedInstance

FOLDER = "dormouse-deploy-"
KEPT_LOGS = ROOT / "build" / "deploy-local"
LEFT_SECONDS_MAX = 10.0
INSTANCE = "local"


class Run:
    """A run of all steps by `all()`. At its end, even after an error, only the logs of a failure remain."""

    def __init__(self, say: Callable[[str], None], *, keep_logs: bool = False) -> None:
        self._say = say
        self._keep_logs = keep_logs
        self._began = time.monotonic()
        self._failed = "begin"
        self._operator: dict[str, str] = {}
        self._reader: dict[str, str] = {}

    def all(self) -> None:
        """Runs all steps. Raises RunFailed with the step, the fault and the folder of the logs."""
        work = Path(tempfile.mkdtemp(prefix=FOLDER))
        logs = work / "logs"
        logs.mkdir()
        place = KEPT_LOGS / work.name
        try:
            self._in(work, logs)
            if self._keep_logs:
                shutil.copytree(logs, place)
        except KeyboardInterrupt:
            shutil.rmtree(work, ignore_errors=True)
            _check_nothing_left(work)
            raise
        except Exception as error:
            shutil.copytree(logs, place)
            raise RunFailed(f"{self._failed}: {_one_line(error)} (logs in {place})") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.step("nothing is left behind", lambda: _check_nothing_left(work))

    def step(self, name: str, do: Callable[[], object]) -> object:
        began = time.monotonic()
        try:
            result = do()
        except BaseException:
            self._failed = name
            raise
        took, since = time.monotonic() - began, time.monotonic() - self._began
        more = f": {result}" if isinstance(result, str) else ""
        self._say(f"[{since:5.0f} s] {name}{more} ({took:.1f} s)")
        return result

    def _in(self, work: Path, logs: Path) -> None:
        self.step("install the emulator", lambda: packages.install_emulator(logs))
        self.step("install the CDK CLI", lambda: packages.install_cdk(logs))
        self.step("build the lambda packages", lambda: packages.build_lambdas(logs))
        self.step("the runtime has what binaries need", lambda: packages.check_binaries(logs))
        cloud = Cloud(work, logs)
        try:
            self.step("start AWS, EMR Serverless and PostgreSQL on loopback", cloud.start)
            packages.copy_packages(work / "checkout", cloud.database.certificates)
            packages.write_settings(work / "local.toml")
            self.step("cdk bootstrap", lambda: cloud.cdk("bootstrap", f"aws://{ACCOUNT}/{REGION}"))
            self.step("cdk diff and deploy of what is not built", lambda: _refused(cloud))
            self.step("cdk deploy --all", lambda: _deploy(cloud))
            self.step("cdk diff", lambda: _diff(cloud))
            self._works(cloud)
            if self._keep_logs:
                cloud.keep_service_logs()
            self.step("dormouse destroy", lambda: _destroy(cloud))
            self.step("end all processes", cloud.stop)
        except Exception:
            with suppress(Exception):
                cloud.keep_service_logs()
            raise
        finally:
            cloud.stop()

    def _works(self, cloud: Cloud) -> None:
        deployed = find(INSTANCE, cloud.session)
        self._operator, self._reader = (people.arrive(cloud, name) for name in people.NAMES)
        self.step("dormouse status", lambda: self._status(cloud, "running"))
        with _opened(cloud, deployed) as instance:
            self.step("strangers are refused", lambda: check_refused(cloud, deployed))
            self.step("make tables", lambda: _make_tables(instance))
            self.step("dormouse table", lambda: operations.ask_for_tables(cloud, instance, self._operator))
            self.step("dormouse access", lambda: access.reach(cloud, self._reader, self._operator))
            self._commits(cloud, instance, deployed.resources)
            self._schedules(cloud, instance, deployed.resources)
            self.step("a migration fails", lambda: operations.fail_to_migrate(cloud, *_app(cloud)))
            self._sleeps(cloud, instance, deployed.resources)
        people.leave(cloud)

    def _commits(self, cloud: Cloud, instance: Instance, resources: Resources) -> None:
        commit = resources.commit
        assert commit is not None
        expected = commits.Expected()

        def good() -> str:
            count = commits.send_good(instance, expected)
            commits.wait_until_applied(cloud, instance, expected)
            return f"{count} messages"

        def bad() -> str:
            count = commits.send_bad(cloud, instance, commit, expected)
            commits.wait_until_applied(cloud, instance, expected)
            return f"{count} messages"

        self.step("the lambda applies commit requests", good)
        self.step("the lambda refuses bad ones", bad)
        self.step("tables and statuses are right", lambda: commits.check(instance, expected))
        self.step("dead letters", lambda: commits.wait_for_dead_letters(cloud, commit, expected))
        self.step(
            "dormouse dead-letters --send-again",
            lambda: commits.send_again(cloud, instance, commit, expected, self._operator),
        )
        self.step("ingest rows through the queue", lambda: operations.ingest(instance))

    def _schedules(self, cloud: Cloud, instance: Instance, resources: Resources) -> None:
        step = operations.compact_by_state_machine
        self.step("compaction, up to EMR", lambda: step(cloud, instance, resources))
        self.step("garbage", lambda: operations.collect_garbage(cloud, instance, resources))

    def _sleeps(self, cloud: Cloud, instance: Instance, resources: Resources) -> None:
        bodies, ids = operations.bodies_meanwhile(instance)
        self.step("dormouse pause", lambda: operations.pause(cloud, resources, self._operator))
        self.step("dormouse status, paused", lambda: self._status(cloud, "paused"))
        self.step(
            "cdk deploy while paused", lambda: operations.deploy_meanwhile(cloud, resources, *_app(cloud))
        )
        self.step("half a pause", lambda: operations.half_pause(cloud, resources))
        self.step("messages while paused", lambda: operations.send_meanwhile(cloud, bodies, resources))
        self.step("AWS starts the database", lambda: operations.start_as_aws_does(cloud, resources))
        waking = partial(operations.resume, cloud, instance, resources, self._operator, ids)
        self.step("dormouse resume", waking)
        self.step("dormouse status, resumed", lambda: self._status(cloud, "running"))
        deploy = partial(operations.deploy_awake, cloud, *_app(cloud))
        self.step("cdk deploy of what was refused", deploy)
        again = partial(access.open_session, cloud, self._reader, self._operator)
        self.step("dormouse access, resumed", again)  # reads no table, as the schema is newer now

    def _status(self, cloud: Cloud, wanted: str) -> str:
        status = json.loads(cloud.dormouse("status", "--instance", INSTANCE, "--json", **self._operator))
        access = "asleep" if wanted == "paused" else "running"
        if not str(status["summary"]).startswith(wanted) or status["access"] != access:
            said = f"it says {status['summary']!r}, and the host for access is {status['access']}"
            raise RunFailed(f"{said}, not {wanted} and {access}")
        return str(status["summary"])


def _app(cloud: Cloud) -> tuple[str, ...]:
    command = f"{sys.executable} -m tests.deploy_local.app {cloud.work}"
    return "--app", command, "--output", str(cloud.work / "cdk.out")


def _refused(cloud: Cloud) -> str:
    """Checks that without built packages `cdk diff` works with placeholders, and `cdk deploy` is refused."""
    built, away = cloud.work / "checkout" / "build", cloud.work / "built"
    built.rename(away)
    cloud.cdk("diff", *_app(cloud))
    _, said = cloud.cdk("deploy", "--all", *_app(cloud), "--require-approval", "never", accept=(1,))
    away.rename(built)
    if "a deploy is refused: run make lambdas, make emr-package" not in said:
        raise RunFailed(f"it does not say what to build: {sign(said)}")
    stacks = [one["StackName"] for one in cloud.client("cloudformation").describe_stacks()["Stacks"]]
    if stacks != ["CDKToolkit"]:
        raise RunFailed(f"it made {', '.join(stacks)}")
    return "diff shows all stacks, deploy is refused"


def _deploy(cloud: Cloud) -> str:
    cloud.cdk("deploy", "--all", *_app(cloud), "--require-approval", "never")
    stacks = cloud.client("cloudformation").describe_stacks()["Stacks"]
    wrong = [one["StackName"] for one in stacks if one["StackStatus"] != "CREATE_COMPLETE"]
    if wrong:
        raise RunFailed(f"the CDK says that it succeeded, the emulator that {', '.join(wrong)} did not")
    return f"{len(stacks) - 1} stacks"


def _diff(cloud: Cloud) -> str:
    """Checks that a new synthesis does not differ from the deployed stacks."""
    code, said = cloud.cdk("diff", "--fail", *_app(cloud), accept=(0, 1))
    if code or "Number of stacks with differences: 0" not in said:
        raise RunFailed(f"it is not empty right after the deploy: {sign(said)}")
    return "empty"


def _destroy(cloud: Cloud) -> str:
    # The deployed assembly: the app that cdk.json names would make another one.
    app = str(cloud.work / "cdk.out")
    cloud.dormouse("destroy", "--config", str(cloud.work / "local.toml"), "--yes", CDK_APP=app)
    left = [one["StackName"] for one in cloud.client("cloudformation").describe_stacks()["Stacks"]]
    if left != ["CDKToolkit"]:
        raise RunFailed(f"stacks are left: {', '.join(left)}")
    return "all stacks are deleted"


def _opened(cloud: Cloud, deployed: DeployedInstance) -> Instance:
    """Opens the instance with the environment of `dormouse env`, trusting the run's certificates."""
    variables = environment(deployed, "dormouse_owner")
    dsn = f"{variables.pop('DORMOUSE_DSN')}&sslrootcert={cloud.database.certificates}"
    os.environ.update(variables)
    return dm.connect(dsn, variables["DORMOUSE_OBJECTS"], staging_dir=str(cloud.work / "staging"))


def _make_tables(instance: Instance) -> str:
    schema = dm.Schema(row_keys=[dm.Field("key", dm.LONG)], values=[dm.Field("value", dm.LONG)])
    for name in (*commits.TABLES, "bulk"):
        instance.create_table(name, schema)
    instance.create_table("events", schema, properties=dm.TableProperties(gc_delay_seconds=0.0))
    return f"{len(instance.tables())} tables"


def _check_nothing_left(work: Path) -> None:
    deadline = time.monotonic() + LEFT_SECONDS_MAX
    while left := list(left_behind(work)):
        if time.monotonic() > deadline:
            raise RunFailed(f"the run left {'; '.join(left)}")
        time.sleep(0.2)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RunFailed) else f"{type(error).__name__}: {text}"
