"""What a run needs before it starts: the emulator, the CDK CLI, and the lambda packages."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from lambdas.build import NO_PYTHON, PACKAGES
from packages import ARCHITECTURES, LAMBDA, interpreter
from tests.binaries import lacking
from tests.deploy_local.cloud import EMULATOR_PYTHON, ROOT, SECONDS_MAX, node
from tests.deploy_local.processes import RunFailed, run

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALLED = ROOT / ".venv-emulator" / ".installed"
BUNDLE = Path("dormouse") / "postgres" / "rds-ca-bundle.pem"
MIGRATIONS = Path("dormouse") / "postgres" / "migrations"


def native_architecture() -> str:
    """Of this machine, as the settings call it."""
    return {"aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "x86_64")


def install_emulator(logs: Path) -> None:
    """Into an environment of its own: its libraries are not those of Dormouse."""
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
    """What package-lock.json pins, with the npm of the Python packages."""
    pinned = ROOT / "package-lock.json"
    installed = ROOT / "node_modules" / ".dormouse-installed"
    if installed.exists() and installed.read_bytes() == pinned.read_bytes():
        return
    npm = [str(node()), str(node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    command = [*npm, "ci", "--no-audit", "--no-fund"]
    environment = {
        **os.environ,
        "PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}",
        "NODE_DISABLE_COMPILE_CACHE": "1",  # which it would leave among the temporary files
    }
    run("npm", command, environment, logs, cwd=ROOT, seconds_max=SECONDS_MAX)
    installed.write_bytes(pinned.read_bytes())


def build_lambdas(logs: Path) -> None:
    """For this machine; what is built already stays."""
    command = [sys.executable, "-m", "lambdas.build", "--architecture", "native"]
    run("lambdas", command, dict(os.environ), logs, cwd=ROOT, seconds_max=SECONDS_MAX)


def check_binaries(logs: Path) -> str:
    """For either processor: no package needs what Lambda's runtime lacks."""
    command = [sys.executable, "-m", "lambdas.build", "--architecture", "all"]
    run("lambdas", command, dict(os.environ), logs, cwd=ROOT, seconds_max=SECONDS_MAX)
    both = sorted(set(ARCHITECTURES.values()))
    for architecture in both:
        for name in PACKAGES:
            for found in lacking(ROOT / "build" / "lambdas" / f"{name}-{architecture}", architecture):
                raise RunFailed(found)
    return f"{' and '.join(both)}, {len(PACKAGES)} packages each"


def copy_packages(target: Path, certificates: Path) -> None:
    """A folder like the checkout, as far as a deployment packs it: its lambdas trust the run's database."""
    for package in sorted((ROOT / "build" / "lambdas").glob(f"*-{native_architecture()}")):
        copy = target / "build" / "lambdas" / package.name
        shutil.copytree(package, copy, symlinks=True)
        if (copy / BUNDLE).exists():
            shutil.copyfile(certificates, copy / BUNDLE)
    archive = target / "build" / "emr" / f"dormouse-{native_architecture()}.tgz"
    archive.parent.mkdir()
    archive.write_bytes(b"")  # no Spark runs here
    shutil.copytree(ROOT / MIGRATIONS, target / MIGRATIONS)
    entry = target / "dormouse" / "spark" / "run.py"
    entry.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "dormouse" / "spark" / "run.py", entry)


def migration_folders(copied: Path) -> list[Path]:
    """Those of what `copy_packages` has made: what the deployment compares, and what the lambda applies."""
    (package,) = (copied / "build" / "lambdas").glob("migrate-*")
    return [copied / MIGRATIONS, package / MIGRATIONS]


def write_settings(target: Path) -> None:
    """Those of local.toml, for this machine."""
    settings = Path(__file__).with_name("local.toml").read_text("utf-8")
    target.write_text(f'architecture = "{native_architecture()}"\n{settings}', "utf-8")
