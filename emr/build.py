"""The build of build/emr/dormouse-<architecture>.tgz: the packages of a run, and a `bin/python` to use them.

    python -m emr.build --architecture arm64|x86_64|native

It is not a virtual environment, so it can be built on any machine (docs/decisions/0014). The same sources and
pins give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import packages
from dormouse.errors import DormouseError
from packages import FIXED_TIME, ROOT, SPARK, Architecture, native

OUTPUT = ROOT / "build" / "emr"
LAUNCHER = Path(__file__).with_name("python")
EXTRA = "query"
BESIDE = ("botocore", "pandas")
"""The packages for IAM tokens of the database, and for Arrow in Spark. EMR has both only for another Python
version."""

PRUNED = ("pyarrow/include", "pyarrow/src", "pyarrow/*flight*", "numpy/f2py", "numpy/doc")
BOTOCORE_DATA = {
    "_retry.json",
    "endpoints.json",
    "partitions.json",
    "sdk-default-configuration.json",
    "sts",
}
"""The data of botocore that credentials need. The rest describes hundreds of services."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emr.build", description="Builds what Spark on EMR runs.")
    parser.add_argument("--architecture", choices=["arm64", "x86_64", "native"], default="arm64")
    given = parser.parse_args(arguments).architecture
    try:
        architecture = native() if given == "native" else given
        archive = OUTPUT / f"dormouse-{architecture}.tgz"
        unpacked = build(architecture, archive)
    except DormouseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    shown = archive.relative_to(ROOT)
    print(f"{shown}: {archive.stat().st_size / 1e6:.0f} MB, {unpacked / 1e6:.0f} MB unpacked")  # noqa: T201
    return 0


def build(architecture: Architecture, archive: Path, package: Path | None = None) -> int:
    """Writes the archive, with a copy of the package dormouse. Returns the unpacked size in bytes.

    The archive appears at its path only when it is complete.
    """
    package = package or packages.home(ROOT) / "dormouse"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dormouse-emr-") as folder:
        root = Path(folder) / "environment"
        site = root / "site-packages"
        site.mkdir(parents=True)
        packages.install(site, architecture, SPARK, pins(), *PRUNED)
        for path in (site / "botocore" / "data").iterdir():
            if path.name.removesuffix(".gz") not in BOTOCORE_DATA:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        packages.copy(
            site / "dormouse", ((path, path.relative_to(package)) for path in packages.sources(package))
        )
        (root / "bin").mkdir()
        shutil.copyfile(LAUNCHER, root / "bin" / "python")
        unfinished = archive.with_name(f"{archive.name}.unfinished")
        size = _pack(root, unfinished)
        unfinished.replace(archive)
    return size


def pins() -> list[str]:
    """Returns the pinned versions of all packages that compaction and ingest need."""
    wanted = packages.closure([*packages.requirements(ROOT, EXTRA), *BESIDE], SPARK)
    return packages.pins((ROOT / "requirements.txt").read_text("utf-8"), wanted)


def _pack(root: Path, archive: Path) -> int:
    """Packs everything below `root`, sorted by name. Returns the unpacked size in bytes.

    Times, owners and modes of this machine are left out.
    """
    size = 0
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=FIXED_TIME, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in sorted(root.rglob("*"), key=lambda one: one.relative_to(root).as_posix()):
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


def _is_executable(root: Path, path: Path) -> bool:
    return path.parent == root / "bin" or ".so" in path.suffixes


if __name__ == "__main__":
    sys.exit(main())
