"""Builds the code of the lambdas: `python -m lambdas.build [--architecture arm64|x86_64|native] [--measure]`.

Each lambda has a folder, `build/lambdas/<name>-<architecture>/`, with what it imports and nothing else;
boto3 is the runtime's. The same sources and pins give the same bytes, wherever and whenever Python 3.11
builds them. It is the lambdas' own, and compiles what it builds, since a lambda keeps no bytecode from one
cold start to the next; another Python leaves that out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import packages
from dormouse.errors import DormouseError, not_installed
from packages import ARCHITECTURES, PYTHON, ROOT, Architecture, native

PACKAGES = ("commit", "compaction", "garbage", "maintenance", "migrate", "pause", "runs")
LIBRARIES = tuple(
    sorted(packages.closure([*packages.requirements(ROOT), "aws-lambda-powertools[tracer]"], {"botocore"}))
)
"""With all that they need but botocore, which the runtime has."""

ELSEWHERE = frozenset(
    {
        "cli", "client", "data", "demo", "query", "rounds", "service", "spark",
        "embedded/postgres.py", "embedded/server.py",
    }
)  # fmt: skip
"""Parts of the package that no lambda comes near."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lambdas.build", description="Builds the lambdas.")
    parser.add_argument("--architecture", choices=["arm64", "x86_64", "native", "all"], default="all")
    parser.add_argument("--measure", action="store_true", help="also tell sizes and cold imports")
    given = parser.parse_args(arguments)
    try:
        for architecture in _architectures(given.architecture):
            built = build(ROOT, ROOT / "build", architecture)
            print(f"{len(PACKAGES)} packages for {architecture}: {'built' if built else 'nothing changed'}")  # noqa: T201
        if given.measure:
            _tell_measures(ROOT / "build", native())
    except DormouseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def build(root: Path, target: Path, architecture: Architecture) -> bool:
    """Builds all packages of an architecture into `<target>/lambdas`; False when nothing has changed.

    Raises DormouseError when the libraries cannot be downloaded.
    """
    pins = packages.pins((root / "requirements.txt").read_text("utf-8"), LIBRARIES)
    sources = {path.relative_to(root): path for path in source_files(root)}
    code = [Path(__file__), Path(packages.__file__)]
    stamp = target / "lambdas" / f".{architecture}"
    digest = packages.digest([architecture, *pins], [*sources.values(), *code])
    folders = {name: target / "lambdas" / f"{name}-{architecture}" for name in PACKAGES}
    if stamp.exists() and stamp.read_text() == digest and all(map(Path.is_dir, folders.values())):
        return False
    libraries = _libraries(target / "cache", architecture, pins, packages.digest([PYTHON, *pins], code)[:16])
    for name, folder in folders.items():
        wanted = {path: source for path, source in sources.items() if _is_of(path, name)}
        _assemble(folder, libraries, wanted)
    stamp.write_text(digest)
    return True


def source_files(root: Path) -> Iterator[Path]:
    """The files of `dormouse` and `lambdas` that lambdas need, in order."""
    yield from packages.sources(root / "dormouse", ELSEWHERE)
    yield from packages.sources(root / "lambdas")


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class ColdImport:
    """The CPU time that an import took, and how many modules it loaded."""

    seconds: float
    modules: int


def cold_import(folder: Path, module: str) -> ColdImport:
    """A new interpreter imports a module of a package, with nothing else on its path but boto3."""
    script = """
import sys, time
sys.path[:] = [sys.argv[1], *(p for p in sys.path if "site-packages" not in p), sys.argv[2]]
began = time.process_time()
__import__(sys.argv[3])
print(time.process_time() - began, len(sys.modules))
"""
    with tempfile.TemporaryDirectory() as runtime:
        link_boto3(Path(runtime))
        command = [sys.executable, "-I", "-S", "-B", "-c", script, str(folder), runtime, module]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=runtime)
    if done.returncode:
        raise DormouseError(f"{module} of {folder} cannot be imported: {done.stderr.strip()}")
    seconds, modules = done.stdout.split()
    return ColdImport(float(seconds), int(modules))


def _is_of(path: Path, name: str) -> bool:
    """Whether a lambda has this source: all that they share, and its own handler."""
    return path.parts[0] != "lambdas" or path.stem in {"__init__", "services", name}


def _architectures(given: str) -> list[Architecture]:
    if given == "all":
        return ["arm64", "x86_64"]
    return [native() if given == "native" else ARCHITECTURES[given]]


def _libraries(cache: Path, architecture: Architecture, pins: list[str], version: str) -> Path:
    """A folder with the libraries, downloaded once; packages link to its files."""
    folder = cache / f"lambdas-{architecture}-{version}"
    if folder.is_dir():
        return folder
    for old in cache.glob(f"lambdas-{architecture}-*"):
        shutil.rmtree(old)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        packages.install(Path(work) / "all", architecture, pins)
        _compile(Path(work) / "all")
        (Path(work) / "all").rename(folder)
    return folder


def _compile(*folders: Path) -> None:
    """Bytecode that is taken as it is, since a package's sources never change."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        return
    for folder in sorted(folders):
        # in a process of its own: what else is loaded shows in the bytes of bytecode
        options = ["-q", "-j1", "--invalidation-mode", "unchecked-hash", "-s", str(folder.parent), "-p", "/"]
        command = [sys.executable, "-I", "-S", "-m", "compileall", *options, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DormouseError(f"{folder.name} cannot be compiled: {done.stdout.strip()}")


def _assemble(folder: Path, libraries: Path, sources: dict[Path, Path]) -> None:
    with packages.whole(folder) as made:
        shutil.copytree(libraries, made, copy_function=os.link, dirs_exist_ok=True)
        packages.copy(made, ((source, path) for path, source in sources.items()))
        _compile(*(made / name for name in {path.parts[0] for path in sources}))


def link_boto3(folder: Path) -> None:
    """What the lambda runtime has of its own."""
    from importlib.util import find_spec

    for name in ("boto3", "botocore", "s3transfer", "jmespath", "dateutil", "urllib3", "six"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise not_installed(name, "lambdas")
        origin = Path(spec.origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (folder / origin.name).symlink_to(origin)


def _tell_measures(target: Path, architecture: Architecture) -> None:
    for name in PACKAGES:
        folder = target / "lambdas" / f"{name}-{architecture}"
        # what else the machine does can only make it longer
        imported = min(
            (cold_import(folder, f"lambdas.{name}") for _ in range(3)), key=lambda one: one.seconds
        )
        size = tree_bytes(folder) / 1024 / 1024
        told = f"cold import {imported.seconds:.2f} s, {imported.modules} modules"
        print(f"{name:12} {size:5.1f} MB unpacked, {told}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
