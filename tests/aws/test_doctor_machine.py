"""Checks of the doctor on this machine: Node, the CDK, packages, the query service's image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dormouse.aws.doctor import image, machine, packages
from tests.support.settings import parse


def results(checks: Any) -> list[tuple[str, str]]:
    return [(check.name, check.result) for check in checks]


def checkout(folder: Path, version: str) -> Path:
    """Creates a checkout whose CDK command prints this version."""
    (folder / "package.json").write_text(json.dumps({"devDependencies": {"aws-cdk": "2.1148.1"}}))
    command = folder / "node_modules/.bin/cdk"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\necho '{version} (build 1)'\n")
    command.chmod(0o755)
    return folder


@pytest.mark.parametrize(("version", "result"), [("2.1148.1", "ok"), ("3.0.0", "wrong")])
def test_the_cdk_must_have_the_pinned_version(version: str, result: str, tmp_path: Path) -> None:
    check = list(machine(checkout(tmp_path, version)))[-1]
    assert (check.name, check.result, "npm ci" in check.mend) == ("cdk", result, result == "wrong")


def test_missing_node_and_cdk_are_wrong_with_instructions_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    node, cdk = machine(tmp_path)
    assert (node.result, cdk.result) == ("wrong", "wrong")
    assert "install Node" in node.mend
    (tmp_path / "package.json").write_text('{"devDependencies": {"aws-cdk": "2"}}')
    assert list(machine(tmp_path))[1].mend == "run npm ci"
    (tmp_path / "node").write_text("#!/bin/sh\necho v18.0.0\n")
    (tmp_path / "node").chmod(0o755)
    assert "too old" in next(machine(tmp_path)).found


def test_packages_that_are_not_built_are_named(tmp_path: Path) -> None:
    settings = parse({"id": "dev", "commit": {}, "compaction": {"engine": "emr-serverless"}})
    lambdas, archive = packages(settings, tmp_path)
    assert (
        "commit-arm64, compaction-arm64, migrate-arm64, pause-arm64, runs-arm64, tables-arm64"
        in lambdas.found
    )
    assert (lambdas.mend, archive.mend) == ("run make lambdas", "run make emr-package ARCHITECTURE=arm64")
    for name in ("commit", "compaction", "migrate", "pause", "runs", "tables"):
        (tmp_path / f"build/lambdas/{name}-arm64").mkdir(parents=True)
    (tmp_path / "build/emr").mkdir()
    (tmp_path / "build/emr/dormouse-arm64.tgz").touch()
    assert {check.result for check in packages(settings, tmp_path)} == {"ok"}


@pytest.mark.parametrize("prints", ["27.0.1", None])
def test_a_query_service_needs_its_image_folder_and_docker(
    prints: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(f"#!/bin/sh\n{f'echo {prints}' if prints else 'exit 1'}\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    settings = parse({"id": "dev", "query": {}})
    wanted = "ok" if prints else "wrong"
    assert results(image(settings, tmp_path)) == [("query image", "wrong"), ("docker", wanted)]
    folder = tmp_path / "build/query-image"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").touch()
    assert results(image(settings, tmp_path)) == [("query image", "ok"), ("docker", wanted)]
    given = {"image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/dormouse:1.0"}
    assert results(image(parse({"id": "dev", "query": given}), tmp_path)) == []
    assert results(image(parse({"id": "dev"}), tmp_path)) == []
