"""The workflows of our CI and of a real account, and the one in the guide for users: their commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages import LAMBDA
from tests.deploy_local.__main__ import parser
from tests.deploy_local.real import BUILD_MINUTES
from tests.deploy_local.real_account import RealAccount
from tests.deploy_local.steps import steps_in

ROOT = Path(__file__).parents[2]
OURS = ROOT / ".github/workflows/ci.yml"
REAL = ROOT / ".github/workflows/real-account.yml"
USERS = ROOT / "docs/how-to/deploy-from-ci.md"


def workflow(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = text.split("```yaml\n")[1].split("\n```\n")[0]
    found = yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


def commands(path: Path) -> list[str]:
    return [step["run"] for job in workflow(path)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", [OURS, USERS, REAL])
def test_the_make_targets_of_a_workflow_exist(path: Path) -> None:
    targets = {
        word
        for command in commands(path)
        for made in re.findall(r"\bmake ([^&\n#]+)", command)
        for word in made.split()
    }
    assert targets
    subprocess.run(
        ["make", "--dry-run", "PYTHON=python3", *targets], cwd=ROOT, check=True, capture_output=True
    )


def test_our_ci_runs_all_tests_on_both_pythons_and_both_databases() -> None:
    assert {".ci/run", "make test-lambdas", "make test-postgres-17"} <= set(commands(OURS))
    steps = workflow(OURS)["jobs"]["lambdas"]["steps"]
    [pythons] = [
        one["with"]["python-version"].split() for one in steps if "python-version" in one.get("with", {})
    ]
    assert LAMBDA.python in pythons


def test_each_job_has_only_the_rights_it_needs() -> None:
    for path in (OURS, USERS):
        found = workflow(path)
        assert found["permissions"] == {"contents": "read"}
        for name, job in found["jobs"].items():
            assert job["timeout-minutes"] <= 180
            wanted = {"diff": {"id-token", "pull-requests"}, "deploy": {"id-token"}}.get(name, set())
            assert {right for right, kind in job.get("permissions", {}).items() if kind == "write"} == wanted


def test_a_run_in_a_real_account_is_started_by_hand_and_never_twice_at_once() -> None:
    found = workflow(REAL)
    assert list(found[True]) == ["workflow_dispatch"]  # YAML reads `on` as true
    assert found["concurrency"] == {"group": "real-account", "cancel-in-progress": False}
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert job["permissions"] == {"contents": "read", "id-token": "write"}
        assert job["environment"] == "real-account"


def test_the_commands_of_a_run_in_a_real_account_name_the_same_instance() -> None:
    given = [shlex.split(one) for one in commands(REAL) if "tests.deploy_local" in one]
    after = [words[words.index("tests.deploy_local") + 1 :] for words in given]
    filled = ([word.replace("$BUDGET_USD", "50") for word in words] for words in after)
    dry, run, destroy = (parser().parse_args(words) for words in filled)
    for options in (dry, run, destroy):
        assert options.real and (options.account, options.instance) == ("$ACCOUNT", "$INSTANCE")
        assert (options.region, str(options.config)) == ("$REGION", "$CONFIG")
    assert (dry.dry_run, run.dry_run, destroy.dry_run) == (True, False, False)
    assert (run.destroy_only, destroy.destroy_only) == (False, True)
    variables = workflow(REAL)["env"]
    named = {name for words in given for word in words for name in re.findall(r"\$([A-Z_]+)", word)}
    assert named == variables.keys()
    assert "github.run_id" in variables["INSTANCE"] and "attempt" not in variables["INSTANCE"]


def test_an_instance_in_a_real_account_is_always_destroyed() -> None:
    jobs = workflow(REAL)["jobs"]
    assert (jobs["destroy"]["needs"], jobs["destroy"]["if"]) == ("deploy", "always()")
    assert all(step["if"] == "always()" for step in jobs["destroy"]["steps"])
    minutes = BUILD_MINUTES + sum(step.minutes for step in steps_in(RealAccount))
    (run,) = (step for step in jobs["deploy"]["steps"] if "--budget-usd" in step.get("run", ""))
    assert 1.5 * minutes < run["timeout-minutes"] < jobs["deploy"]["timeout-minutes"] <= 360  # GitHub's limit
    for job in jobs.values():
        *_, logs = job["steps"]
        assert logs["if"] == "always()" and logs["with"]["path"] == "build/deploy-local"
        (role,) = (one["with"] for one in job["steps"] if "role-to-assume" in one.get("with", {}))
        assert role["role-to-assume"] == "${{ vars.E2E_ROLE_ARN }}"
        of_step = max(step.get("timeout-minutes", 0) for step in job["steps"]) or job["timeout-minutes"]
        assert role["role-duration-seconds"] >= 60 * of_step


def test_all_workflows_pin_an_action_to_the_same_commit() -> None:
    uses = re.compile(r"uses: ([\w/-]+)@([0-9a-f]{40})  # (v[\d.]+)$", re.MULTILINE)
    texts = [path.read_text("utf-8") for path in (OURS, REAL, USERS)]
    assert all(text.count("uses: ") == len(uses.findall(text)) for text in texts)
    pins = {found for text in texts for found in uses.findall(text)}
    assert len(pins) == len({action for action, _, _ in pins})


def test_the_workflow_of_users_builds_everything_and_deploys_without_a_question() -> None:
    run = commands(USERS)
    deploy = next(one for one in run if "cdk deploy" in one)
    assert "--require-approval never" in deploy  # without a terminal, a question would end the deploy
    assert "make lambdas emr-package query-image" in run
    assert any("cdk synth" in one for one in run) and any("cdk diff" in one for one in run)
