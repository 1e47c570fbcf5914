"""The steps of a run between its preparation and its end, for the emulated account and for a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import dormouse as dm
from dormouse.aws.instance import find
from dormouse.settings.resources import CommitResources, Resources
from tests.deploy_local import access, commits, demo, operations
from tests.deploy_local.account import Account, Person
from tests.deploy_local.cloud import Cloud
from tests.deploy_local.processes import RunFailed, sign
from tests.deploy_local.strangers import check_refused
from tests.support.api import Instance
from tests.support.aws import DeployedInstance


class Deployment:
    """The instance of a run, and what its steps leave for later steps."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.expected = commits.Expected()
        self.bodies: list[str] = []
        self.commit_ids: list[str] = []
        self.image = ""

    @property
    def cloud(self) -> Cloud:
        """The account of a step that only the emulator can do."""
        assert isinstance(self.account, Cloud)
        return self.account

    @cached_property
    def deployed(self) -> DeployedInstance:
        return find(self.account.instance_id, self.account.session)

    @property
    def resources(self) -> Resources:
        return self.deployed.resources

    @property
    def commit(self) -> CommitResources:
        assert self.resources.commit is not None
        return self.resources.commit

    @cached_property
    def operator(self) -> Person:
        return self.account.person("operator")

    @cached_property
    def reader(self) -> Person:
        return self.account.person("reader")

    def opened(self) -> AbstractContextManager[Instance]:
        return self.account.opened(self.deployed)


@dataclass(frozen=True)
class Step:
    """A step of a run, which returns its result in words.

    `emulated` says that only the emulator can do it: it moves time, plays AWS's part, breaks a deploy on
    purpose, or needs users of its own. `minutes` is how long it takes in a real account: an estimate, not a
    measurement.
    """

    name: str
    do: Callable[[Deployment], object]
    minutes: float = 0.1
    emulated: bool = False


def steps_in(account: type[Account]) -> tuple[Step, ...]:
    """Returns the steps for a kind of account, in order."""
    return tuple(step for step in STEPS if account.is_emulated or not step.emulated)


def _deploy(run: Deployment) -> str:
    account = run.account
    account.cdk("deploy", "--all", *account.app, "--require-approval", "never")
    stacks = account.stacks()
    wrong = [one["StackName"] for one in stacks if one["StackStatus"] != "CREATE_COMPLETE"]
    if wrong or not stacks:
        raise RunFailed(f"the CDK says that it succeeded, but {', '.join(wrong) or 'every stack'} did not")
    return f"{len(stacks)} stacks"


def _diff(run: Deployment) -> str:
    """Checks that a new synthesis does not differ from the deployed stacks."""
    code, said = run.account.cdk("diff", "--fail", *run.account.app, accept=(0, 1))
    if code or "Number of stacks with differences: 0" not in said:
        raise RunFailed(f"it is not empty right after the deploy: {sign(said)}")
    return "empty"


def _refused_deploy(run: Deployment) -> str:
    """Checks that without built packages `cdk diff` works with placeholders, and `cdk deploy` is refused."""
    cloud = run.cloud
    built, away = cloud.work / "checkout" / "build", cloud.work / "built"
    built.rename(away)
    cloud.cdk("diff", *cloud.app)
    _, said = cloud.cdk("deploy", "--all", *cloud.synthesized, "--require-approval", "never", accept=(1,))
    away.rename(built)
    if "a deploy is refused: run make lambdas, make emr-package" not in said:
        raise RunFailed(f"it does not say what to build: {sign(said)}")
    if made := [one["StackName"] for one in cloud.stacks()]:
        raise RunFailed(f"it made {', '.join(made)}")
    return "diff shows all stacks, deploy is refused"


def _destroy(run: Deployment) -> str:
    destroy(run.account)
    return "all stacks are deleted"


def destroy(account: Account) -> None:
    """Destroys the instance. Raises RunFailed if stacks are left."""
    account.leave()
    given = ("--config", str(account.settings), "--yes")
    account.dormouse("destroy", *given, **account.destroy_variables)
    if left := [one["StackName"] for one in account.stacks()]:
        raise RunFailed(f"stacks are left: {', '.join(left)}")


def _status(wanted: str) -> Callable[[Deployment], str]:
    def check(run: Deployment) -> str:
        given = ("status", "--instance", run.account.instance_id, "--json")
        status = json.loads(run.account.dormouse(*given, **run.operator))
        host = "asleep" if wanted == "paused" else "running"
        if not str(status["summary"]).startswith(wanted) or status["access"] != host:
            said = f"it says {status['summary']!r}, and the host for access is {status['access']}"
            raise RunFailed(f"{said}, not {wanted} and {host}")
        return str(status["summary"])

    return check


def _in_instance(do: Callable[[Deployment, Instance], object]) -> Callable[[Deployment], object]:
    """Returns a step that opens the instance, calls `do` with it, and closes it."""

    def opened(run: Deployment) -> object:
        with run.opened() as instance:
            return do(run, instance)

    return opened


def _make_tables(_run: Deployment, instance: Instance) -> str:
    schema = dm.Schema(row_keys=[dm.Field("key", dm.LONG)], values=[dm.Field("value", dm.LONG)])
    for name in (*commits.TABLES, "bulk"):
        instance.create_table(name, schema)
    instance.create_table("events", schema, properties=dm.TableProperties(gc_delay_seconds=0.0))
    return f"{len(instance.tables())} tables"


def _good_commits(run: Deployment, instance: Instance) -> str:
    count = commits.send_good(instance, run.expected)
    commits.wait_until_applied(run.account, instance, run.expected)
    return f"{count} messages"


def _bad_commits(run: Deployment, instance: Instance) -> str:
    count = commits.send_bad(run.account, instance, run.commit, run.expected)
    commits.wait_until_applied(run.account, instance, run.expected)
    return f"{count} messages"


def _bodies(run: Deployment, instance: Instance) -> str:
    """Encodes the messages for the pause, because only a running database has the table's id."""
    run.bodies, run.commit_ids = operations.bodies_meanwhile(instance)
    return f"{len(run.bodies)} messages"


def _publish_image(run: Deployment) -> str:
    run.image = str(run.cloud.ask("/images")["arm64"])
    return run.image


STEPS = (
    Step("cdk diff and deploy of what is not built", _refused_deploy, emulated=True),
    Step("cdk deploy --all", _deploy, 35),
    Step("cdk diff", _diff, 2),
    Step("dormouse status", _status("running")),
    Step("strangers are refused", lambda run: check_refused(run.cloud, run.deployed), emulated=True),
    Step("make tables", _in_instance(_make_tables), 2),
    Step("dormouse table",
         _in_instance(lambda run, opened: operations.ask_for_tables(run.account, opened, run.operator)), 2),
    Step("dormouse access", lambda run: access.reach(run.account, run.reader), 1),
    Step("sessions of others are refused",
         lambda run: access.refused_sessions(run.cloud, run.reader, run.operator), emulated=True),
    Step("the lambda applies commit requests", _in_instance(_good_commits), emulated=True),
    Step("the lambda refuses bad ones", _in_instance(_bad_commits), emulated=True),
    Step("tables and statuses are right",
         _in_instance(lambda run, opened: commits.check(opened, run.expected)), emulated=True),
    Step("dead letters", lambda run: commits.wait_for_dead_letters(run.account, run.commit, run.expected),
         emulated=True),
    Step("dormouse dead-letters --send-again",
         _in_instance(lambda run, opened: commits.send_again(
             run.account, opened, run.commit, run.expected, run.operator)), emulated=True),
    Step("ingest rows through the queue",
         _in_instance(lambda _, opened: operations.ingest(opened)), 2),
    Step("garbage",
         _in_instance(lambda run, opened: operations.collect_garbage(
             run.account, opened, run.resources)), 2),
    Step("load the demo", _in_instance(lambda _, opened: demo.load(opened)), 4),
    Step("compaction by EMR",
         lambda run: operations.compact_by_state_machine(run.account, run.opened, run.resources), 8),
    Step("the demo's questions", _in_instance(lambda _, opened: demo.ask(opened)), 2),
    Step("a migration fails", lambda run: operations.fail_to_migrate(run.cloud), emulated=True),
    Step("messages for a pause", _in_instance(_bodies), 1),
    Step("dormouse pause", lambda run: operations.pause(run.account, run.resources, run.operator), 15),
    Step("dormouse status, paused", _status("paused")),
    Step("cdk deploy while paused", lambda run: operations.deploy_meanwhile(run.cloud, run.resources),
         emulated=True),
    Step("half a pause", lambda run: operations.half_pause(run.cloud, run.resources), emulated=True),
    Step("messages while paused",
         lambda run: operations.send_meanwhile(run.account, run.bodies, run.resources), 1),
    Step("AWS starts the database", lambda run: operations.start_as_aws_does(run.cloud, run.resources),
         emulated=True),
    Step("AWS publishes an image", _publish_image, emulated=True),
    Step("dormouse resume", lambda run: operations.resume(run.account, run.resources, run.operator), 20),
    Step("the host has the newest image", lambda run: operations.check_newest_image(run.cloud, run.image),
         emulated=True),
    Step("the messages are processed",
         _in_instance(lambda run, opened: operations.wait_for_meanwhile(
             run.account, opened, run.commit_ids)), 3),
    Step("dormouse status, resumed", _status("running")),
    Step("the demo's questions, resumed", _in_instance(lambda _, opened: demo.ask(opened)), 2),
    Step("cdk deploy of what was refused", lambda run: operations.deploy_awake(run.cloud), emulated=True),
    Step("sessions, resumed",  # reads no table: the schema is newer now
         lambda run: access.refused_sessions(run.cloud, run.reader, run.operator), emulated=True),
    Step("dormouse destroy", _destroy, 45),
)  # fmt: skip
"""All steps. A real account has those that are not `emulated`, as the same objects."""
