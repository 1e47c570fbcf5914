"""Builds build/emr/dormouse-<architecture>.tgz: the packages of a run, and a `bin/python` that has them.

    python -m emr.build --architecture arm64|x86_64|native

It is not a virtual environment, so it can be built on any machine (docs/decisions/0014). The same sources and
pins give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "emr"
LAUNCHER = Path(__file__).with_name("python")
MACHINES = {"arm64": "aarch64", "x86_64": "x86_64"}
GLIBC_MIN, GLIBC_MAX = 17, 28
"""Wheels for glibc 2.17 to 2.28; Amazon Linux 2023 has 2.34."""

FIXED_TIME = 315_532_800  # 1980, as zip files begin
EXTRA = "query"
BESIDE = ("botocore",)
"""The IAM tokens of the database; EMR has it for another Python only."""

PRUNED = (
    "**/__pycache__",
    "**/tests",
    "**/*.pyx",
    "**/*.pxd",
    "**/*.pyi",
    "**/*.a",
    "**/*.h",
    "**/*.cc",
    "bin",
    "*.dist-info/RECORD",
    "*.dist-info/INSTALLER",
    "*.dist-info/REQUESTED",
    "*.dist-info/direct_url.json",
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/*flight*",
    "numpy/f2py",
    "numpy/doc",
)
BOTOCORE_DATA = {
    "_retry.json",
    "endpoints.json",
    "partitions.json",
    "sdk-default-configuration.json",
    "sts",
}
"""What credentials need; the rest describes hundreds of services."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emr.build", description="Builds what Spark on EMR runs.")
    parser.add_argument("--architecture", choices=[*MACHINES, "native"], default="arm64")
    given = parser.parse_args(arguments).architecture
    architecture = native() if given == "native" else given
    archive = OUTPUT / f"dormouse-{architecture}.tgz"
    unpacked = build(architecture, archive)
    shown = archive.relative_to(ROOT)
    print(f"{shown}: {archive.stat().st_size / 1e6:.0f} MB, {unpacked / 1e6:.0f} MB unpacked")  # noqa: T201
    return 0


def native() -> str:
    """The architecture of this machine."""
    machine = platform.machine()
    return next((name for name, known in MACHINES.items() if machine in (name, known)), machine)


def build(architecture: str, archive: Path, package: Path = ROOT / "dormouse") -> int:
    """Writes the archive whole, with a copy of the package; gives how many bytes there are in it."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dormouse-emr-") as folder:
        root = Path(folder) / "environment"
        site = root / "site-packages"
        site.mkdir(parents=True)
        _install(site, MACHINES[architecture])
        _prune(site)
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(package, site / "dormouse", ignore=ignored)
        (root / "bin").mkdir()
        shutil.copyfile(LAUNCHER, root / "bin" / "python")
        unfinished = archive.with_name(f"{archive.name}.unfinished")
        size = _pack(root, unfinished)
        unfinished.replace(archive)
    return size


def _install(site: Path, machine: str) -> None:
    """The wheels of exactly the versions in requirements.txt, whatever machine this is."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MAX, GLIBC_MIN - 1, -1)]
    tags = [word for one in (*platforms, f"manylinux2014_{machine}") for word in ("--platform", one)]
    options = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--no-compile"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
    pins = ["--constraint", str(ROOT / "requirements.txt"), "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *quiet, *options, *tags, *pins, *requirements()]
    subprocess.run(command, check=True)


def requirements() -> list[str]:
    """What Dormouse needs to compact, by name: its core, what reads and writes Parquet, and for tokens."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"][EXTRA], *BESIDE]


def _prune(site: Path) -> None:
    for pattern in PRUNED:
        for path in sorted(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
    data = site / "botocore" / "data"
    for path in data.iterdir():
        if path.name.removesuffix(".gz") not in BOTOCORE_DATA:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _pack(root: Path, archive: Path) -> int:
    """Everything below `root`, in the order of names, without times, owners and modes of this machine."""
    size = 0
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=FIXED_TIME, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in _in_order(root):
            info = tarfile.TarInfo(path.relative_to(root).as_posix())
            info.mtime, info.mode = FIXED_TIME, 0o755 if _is_executable(root, path) else 0o644
            if path.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
                continue
            info.size = path.stat().st_size
            size += info.size
            with path.open("rb") as file:
                tar.addfile(info, file)
    return size


def _in_order(root: Path) -> Iterable[Path]:
    return sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix())


def _is_executable(root: Path, path: Path) -> bool:
    return path.parent == root / "bin" or ".so" in path.suffixes


if __name__ == "__main__":
    sys.exit(main())
