"""The workflow of our CI, and the workflow in the guide for users: the commands that they run exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages import LAMBDA

ROOT = Path(__file__).parents[2]
OURS = ROOT / ".github/workflows/ci.yml"
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


@pytest.mark.parametrize("path", [OURS, USERS])
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


def test_the_workflow_of_users_builds_everything_and_deploys_without_a_question() -> None:
    run = commands(USERS)
    deploy = next(one for one in run if "cdk deploy" in one)
    assert "--require-approval never" in deploy  # without a terminal, a question would end the deploy
    assert "make lambdas emr-package query-image" in run
    assert any("cdk synth" in one for one in run) and any("cdk diff" in one for one in run)
