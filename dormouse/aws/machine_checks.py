"""What the doctor looks at on this machine: Node, the CDK, what is built; and what all its checks are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dormouse.settings.deployment import DeploymentSettings

NODE_LEAST = 20
COMMAND_SECONDS_MAX = 60
INSTALL_NODE = "install Node 20 or later from https://nodejs.org, or put .venv/bin, which has it, on PATH"
LAMBDAS = ("migrate", "commit", "garbage", "compaction", "runs", "maintenance", "pause")
Result = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Check:
    name: str
    result: Result
    found: str
    mend: str = ""
    """What to do; empty when it is ok."""

    @classmethod
    def of(cls, name: str, fine: str, trouble: str | None, mend: str, result: Result = "wrong") -> Check:
        """`result` where there is trouble."""
        return cls(name, result, trouble, mend) if trouble else cls(name, "ok", fine)


def machine(root: Path) -> Iterator[Check]:
    node = _output(["node", "--version"])
    number = re.match(r"v(\d+)", node or "")
    old = f"Node {node}, which is too old for the CDK" if number and int(number[1]) < NODE_LEAST else None
    yield Check.of("node", f"Node {node}", old if number else "there is no Node", INSTALL_NODE)
    yield _cdk(root)


def _cdk(root: Path) -> Check:
    try:
        package = json.loads((root / "package.json").read_text("utf-8"))
        pin = str(package["devDependencies"]["aws-cdk"])
    except (OSError, ValueError, KeyError, TypeError):
        return Check(
            "cdk", "wrong", "there is no package.json that pins it", "run this in Dormouse's checkout"
        )
    command = root / "node_modules/.bin/cdk"
    found = (_output([str(command), "--version"], root) or "").split(" ")[0]
    other = f"the CDK {found or 'that does not start'}, not {pin}" if found != pin else None
    trouble = other if command.exists() else f"the CDK {pin} is not installed"
    return Check.of("cdk", f"the CDK {pin}", trouble, "run npm ci")


def packages(settings: DeploymentSettings, root: Path) -> Iterator[Check]:
    parts = {"migrate", "tables", *(name for name in LAMBDAS if getattr(settings, name, None) is not None)}
    if settings.compaction or settings.maintenance:
        parts.add("runs")
    if settings.query or settings.access:
        parts.add("pause")
    folders = [root / f"build/lambdas/{name}-{settings.architecture}" for name in sorted(parts)]
    missing = ", ".join(folder.name for folder in folders if not folder.is_dir())
    trouble = f"not built: {missing}" if missing else None
    yield Check.of("lambdas", f"{len(folders)} packages are built", trouble, "run make lambdas")
    if settings.compaction:
        archive = root / f"build/emr/dormouse-{settings.architecture}.tgz"
        trouble = None if archive.exists() else f"{archive.name} is not built"
        mend = f"run make emr-package ARCHITECTURE={settings.architecture}"
        yield Check.of("emr package", f"{archive.name} is built", trouble, mend)


def image(settings: DeploymentSettings, root: Path) -> Iterator[Check]:
    """What a deploy needs to build the image of the query service."""
    if settings.query is None or settings.query.image is not None:
        return
    is_made = (root / "build/query-image/Dockerfile").exists()
    trouble = None if is_made else "build/query-image is not made"
    yield Check.of("query image", "build/query-image is made", trouble, "run make query-image")
    version = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    mend = "install and start Docker, or name an image in ECR in query.image"
    trouble = "there is no Docker that runs, to build the query image with" if version is None else None
    yield Check.of("docker", f"Docker {version}", trouble, mend)


def _output(command: list[str], folder: Path | None = None) -> str | None:
    """What a command prints, or None when it cannot be started or fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS_MAX
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
