"""The deployment into a real account, as far as it can be tried without one."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest
from moto import mock_aws
from moto.budgets.models import budgets_backends

from dormouse.settings.resources import RunResources
from tests.deploy_local import packages, real_account
from tests.deploy_local.__main__ import main
from tests.deploy_local.cloud import Cloud
from tests.deploy_local.processes import RunFailed
from tests.deploy_local.real import DESTROYS_MAX, RealRun, Wanted
from tests.deploy_local.real_account import RealAccount, write_settings
from tests.deploy_local.steps import STEPS, steps_in

ROOT = Path(__file__).parents[2]
ACCOUNT, REGION, ID = "123456789012", "eu-west-1", "e2e-1"
WANTED = Wanted(ACCOUNT, REGION, ID)
REAL = ["--real", "--account", ACCOUNT, "--region", REGION, "--instance", ID]
STACK = f"dormouse-{ID}-network"
TEMPLATE = json.dumps({"Resources": {"Queue": {"Type": "AWS::SQS::Queue"}}})


@pytest.fixture(autouse=True)
def moto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Emulates the account 123456789012. The programs for sessions are there, and nothing is built."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in real_account.PROGRAMS:
        program(programs / name, "raise SystemExit(1)")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, REGION)
    for name in ("install_cdk", "build_all"):
        monkeypatch.setattr(packages, name, lambda *_: None)
    monkeypatch.setattr("tests.deploy_local.account._cli", lambda: Path("cdk"))
    monkeypatch.setattr("tests.deploy_local.run.KEPT_LOGS", tmp_path / "kept")
    with mock_aws():
        yield


def program(path: Path, code: str) -> None:
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)


class Tried(RealAccount):
    """An account whose commands only make and delete a stack, and fail as wanted."""

    def __init__(self, work: Path, logs: Path, failing: Mapping[str, BaseException]) -> None:
        super().__init__(work, logs, instance_id=ID, region=REGION)
        self.ran: list[str] = []
        self.failing = failing
        self.checks: list[dict[str, str]] = []

    def make_stack(self) -> None:
        tags = [{"Key": "dormouse:instance", "Value": ID}]
        self.client("cloudformation").create_stack(StackName=STACK, TemplateBody=TEMPLATE, Tags=tags)

    def _run(self, name: str, command: Any, *_: Any) -> tuple[int, str]:
        self.ran.append(name)
        if name == "cdk-deploy":
            self.make_stack()
        if name in self.failing:
            raise self.failing[name]
        if name == "dormouse-destroy":
            assert command[-1] == "--yes"
            self.client("cloudformation").delete_stack(StackName=STACK)
        if name == "dormouse-doctor":
            return 0, json.dumps({"checks": self.checks})
        return 0, "Number of stacks with differences: 0"


class TriedRun(RealRun):
    """A run in such an account."""

    def __init__(self, failing: Mapping[str, BaseException], wanted: Wanted = WANTED) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append, wanted)
        self._failing = failing
        self.account: Tried | None = None

    def _account(self, work: Path, logs: Path) -> Tried:
        self.account = self.account or Tried(work, logs, self._failing)
        return self.account

    @property
    def ran(self) -> list[str]:
        assert self.account is not None
        return self.account.ran


def test_both_accounts_have_the_same_steps_except_those_of_the_emulator() -> None:
    real = steps_in(RealAccount)
    assert steps_in(Cloud) == STEPS and set(map(id, real)) < set(map(id, STEPS))
    names = [step.name for step in real]
    wanted = ["cdk deploy --all", "load the demo", "compaction by EMR", "dormouse pause", "dormouse resume"]
    wanted += ["the demo's questions, resumed", "dormouse destroy"]
    assert [name for name in names if name in wanted] == wanted and names[-1] == wanted[-1]


def test_a_dry_run_prints_the_steps_and_the_cost_and_asks_no_account(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RealAccount, "session", None)
    assert main([*REAL, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(f"min  {step.name}\n" in out for step in steps_in(RealAccount))
    found = re.search(r"about ([0-9.]+) USD", out)
    assert found and 0.5 < float(found[1]) < 10


def test_a_real_run_must_name_account_region_and_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--real", "--region", REGION]) == 2
    assert capsys.readouterr().err == "--real needs --account, --instance\n"


def test_another_account_is_refused_and_nothing_is_done() -> None:
    run = TriedRun({}, Wanted("999999999999", REGION, ID))
    with pytest.raises(RunFailed, match="are of the account 123456789012, not 999999999999: nothing was"):
        run.all()
    assert run.ran == []


def test_missing_credentials_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as without:  # moto needs its credentials again
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            without.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            without.setenv(name, "/nowhere")
        without.setenv("AWS_EC2_METADATA_DISABLED", "true")
        assert main(REAL) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the account is the right one: there are no AWS credentials: log in" in line


def test_an_instance_that_exists_is_refused_and_stays(tmp_path: Path) -> None:
    run = TriedRun({})
    run._account(tmp_path, tmp_path).make_stack()
    with pytest.raises(RunFailed, match=f"already .{STACK}.: choose another --instance, or end it with"):
        run.all()
    assert run.ran == []


@pytest.mark.parametrize("error", [RunFailed("no more addresses"), KeyboardInterrupt()])
def test_the_instance_is_destroyed_after_a_step_that_fails(error: BaseException) -> None:
    run = TriedRun({"cdk-deploy": error})
    with pytest.raises(type(error)) as raised:
        run.all()
    assert run.ran == ["dormouse-doctor", "cdk-deploy", "dormouse-destroy"]
    assert run.account is not None and run.account.stacks() == []
    assert isinstance(error, KeyboardInterrupt) or "cdk deploy --all: no more addresses" in str(raised.value)


def test_a_destroy_that_fails_is_tried_again_and_the_command_for_later_is_named() -> None:
    run = TriedRun({"cdk-diff": RunFailed("no diff"), "dormouse-destroy": RunFailed("a bucket is not empty")})
    with pytest.raises(
        RunFailed, match=r"costs money: a bucket is not empty. Try python -m .*--destroy-only"
    ):
        run.all()
    assert run.ran.count("dormouse-destroy") == DESTROYS_MAX
    assert "cdk diff failed: no diff" in run.lines


@pytest.mark.parametrize("is_left", [False, True])
def test_only_a_destroy_works_whether_or_not_an_earlier_run_left_something(
    tmp_path: Path, is_left: bool
) -> None:
    if is_left:
        Tried(tmp_path, tmp_path, {}).make_stack()
    run = TriedRun({})
    run.only_destroy()
    assert run.ran == ["dormouse-destroy"] * is_left
    assert run.account is not None and run.account.stacks() == []


def test_a_destroy_in_another_account_is_refused(tmp_path: Path) -> None:
    Tried(tmp_path, tmp_path, {}).make_stack()
    run = TriedRun({}, Wanted("999999999999", REGION, ID))
    with pytest.raises(RunFailed, match="not 999999999999: nothing was done"):
        run.only_destroy()
    assert run.ran == []


def test_a_missing_program_is_named_before_anything_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run = TriedRun({})
    with pytest.raises(RunFailed, match="programs for sessions: aws is missing: install the AWS CLI"):
        run.all()
    assert run.ran == []


@pytest.mark.parametrize(
    ("check", "is_refused"),
    [
        (("wrong", "version 4, and 6 is needed", "run cdk bootstrap"), True),
        (("warning", "not checked: servicequotas:GetServiceQuota is denied", "get that permission"), True),
        (("warning", "lambdas at once: not known", "look it up"), False),
    ],
)
def test_what_doctor_finds_refuses_a_run_before_it_deploys(
    tmp_path: Path, check: tuple[str, str, str], is_refused: bool
) -> None:
    run = TriedRun({"cdk-deploy": RunFailed("it came to a deploy")})
    result, found, mend = check
    checks = [{"name": "bootstrap", "result": result, "found": found, "mend": mend}]
    run._account(tmp_path, tmp_path).checks = checks
    with pytest.raises(RunFailed) as raised:
        run.all()
    assert (f"dormouse doctor: bootstrap: {found} ({mend})" in str(raised.value)) == is_refused
    assert ("cdk-deploy" in run.ran) != is_refused


def test_the_budget_is_made_once_and_refuses_a_run_when_it_is_spent(tmp_path: Path) -> None:
    account = Tried(tmp_path, tmp_path, {})
    assert "is made, of 50 USD" in account.keep_budget(ACCOUNT, 50, "owner@example.com")
    assert account.keep_budget(ACCOUNT, 50, None) == "0 USD of 50 are spent this month"
    (budget,) = budgets_backends[ACCOUNT]["aws"].budgets[ACCOUNT].values()
    assert [one.subscribers for one in budget.notifications] == [
        [{"SubscriptionType": "EMAIL", "Address": "owner@example.com"}]
    ]
    budget.budget["CalculatedSpend"] = {"ActualSpend": {"Amount": "50.5", "Unit": "USD"}}
    run = TriedRun({})
    with pytest.raises(RunFailed, match=r"the budget dormouse-e2e is spent: 50\.5 USD of 50 this month"):
        run.all()
    assert run.ran == []


def test_a_file_of_settings_that_is_missing_or_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("id = \n", "utf-8")
    for name, line in (("none.toml", "there is no file"), ("bad.toml", "is not TOML")):
        assert main([*REAL, "--dry-run", "--config", str(tmp_path / name)]) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("deploy-local failed: ") and line in said


def test_settings_that_protect_the_instance_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="protected = true, so a run could not destroy"):
        write_settings(tmp_path / "real.toml", ID, ROOT / "config/prod.toml")


@pytest.mark.parametrize("base", [real_account.BASE, ROOT / "config/dev.toml"], ids=["minimal", "dev"])
def test_the_settings_of_a_run_are_those_given_and_what_a_run_needs(tmp_path: Path, base: Path) -> None:
    settings = write_settings(tmp_path / "real.toml", ID, base)
    assert settings.id == ID
    assert settings.compaction is not None and settings.compaction.engine == "emr-serverless"
    assert settings.access is not None and settings.pause is not None and settings.garbage is not None
    assert settings.compaction.vcpu_max == 16  # the quota of a new account


SESSION = """
import json, os, pathlib, socket, sys, time
tries = pathlib.Path(os.environ["TRIES"])
tries.write_text(tries.read_text() + "x")
if len(tries.read_text()) < 3:
    raise SystemExit("TargetNotConnected: i-0123456789abcdef0 is not connected")
port = int(json.loads(sys.argv[-1])["localPortNumber"][0])
with socket.create_server(("127.0.0.1", port)):
    time.sleep(600)
"""


def test_a_session_is_started_again_until_its_port_is_open_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin" / "aws", SESSION)
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    (tmp_path / "tries").touch()
    monkeypatch.setattr(real_account, "SESSION_POLL_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = f"""aws ssm start-session --parameters '{{"localPortNumber": ["{port}"]}}'"""
    account = Tried(tmp_path, tmp_path, {})
    with account.forwarded(command) as address:
        socket.create_connection((address, port)).close()
        assert (tmp_path / "tries").read_text() == "xxx"
        with (
            pytest.raises(RunFailed, match=f"port {port} of this machine is in use"),
            account.forwarded(command),
        ):
            pass
    aws = str(tmp_path / "bin" / "aws")
    assert [one.pid for one in psutil.process_iter(["cmdline"]) if aws in (one.info["cmdline"] or ())] == []


def test_a_schedule_that_a_pause_has_switched_off_starts_nothing(tmp_path: Path) -> None:
    account = Tried(tmp_path, tmp_path, {})
    account.client("events").put_rule(Name="compaction", ScheduleExpression="rate(1 day)", State="DISABLED")
    role = f"arn:aws:iam::{ACCOUNT}:role/states"
    definition = json.dumps({"StartAt": "End", "States": {"End": {"Type": "Succeed"}}})
    states = account.client("stepfunctions")
    machine = states.create_state_machine(name="runs", definition=definition, roleArn=role)["stateMachineArn"]
    part = RunResources(rules=("compaction",), function="create", state_machine=machine)
    started = []
    for state in ("disable_rule", "enable_rule"):
        getattr(account.client("events"), state)(Name="compaction")
        account.fire(part)
        started.append(len(states.list_executions(stateMachineArn=machine)["executions"]))
    assert started == [0, 1]


# The rights of the role, in the page about it.

USED = (
    "make, drop and convert tables", "work with tables", "submit commit requests",
    "`dormouse table --instance ID`", "reach the database through the host for access",
    "`dormouse env`, `access`", "`dormouse pause`, `resume`", "`dormouse status`", "`dormouse doctor`",
    "`dormouse destroy`",
)  # fmt: skip
"""The rows of the security page that a run needs."""

OF_STEPS = {
    "budgets:ModifyBudget", "budgets:ViewBudget", "ec2:DescribeInstances", "emr-serverless:GetJobRun",
    "logs:DescribeLogGroups", "logs:FilterLogEvents", "s3:GetObject", "s3:ListBucket",
    "states:StartExecution", "sts:AssumeRole",
}  # fmt: skip
"""The actions that the steps need themselves."""

UNUSED = ("elasticmapreduce:", "ecs:", "backup:", "iam:GetPolicy")
"""The rights for parts that the settings of a run do not have."""

NO_RIGHTS = ("sts:GetCallerIdentity", "lambda:Switch")
"""An action that needs no right, and the name of a lambda."""


def actions_in(row: str) -> set[str]:
    """Returns the actions in a row; a service that is named once holds for those that follow."""
    service, found = "", set()
    for word in re.findall(r"`([A-Za-z0-9:-]+)`", row):
        before, colon, name = word.rpartition(":")
        service = before if colon else service
        if re.fullmatch(r"[A-Z][A-Za-z0-9]+|connect", name) and service:
            found.add(f"{service}:{name}")
    return found


def test_the_role_in_the_guide_may_do_what_a_run_does() -> None:
    page = (ROOT / "docs/how-to/deploy-from-ci.md").read_text("utf-8")
    (policy,) = [
        json.loads(block)
        for block in re.findall(r"```json\n(.+?)\n *```", page, re.DOTALL)
        if "budgets:" in block
    ]
    allowed = [action for one in policy["Statement"] for action in one["Action"]]
    security = (ROOT / "docs/security.md").read_text("utf-8")
    rows = [row for row in re.findall(r"^\| (.+)\|$", security, re.MULTILINE) if row.startswith(USED)]
    assert len(rows) == len(USED)
    needed = OF_STEPS.union(*map(actions_in, rows))
    lacking = [one for one in needed if not any(fnmatch(one, pattern) for pattern in allowed)]
    assert sorted(one for one in lacking if not one.startswith(UNUSED + NO_RIGHTS)) == []
