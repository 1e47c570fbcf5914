"""Builds the code of the lambdas: `python -m lambdas.build [--architecture arm64|x86_64|native] [--measure]`.

Each lambda has a folder, `build/lambdas/<name>-<architecture>/`, with what it imports and nothing else;
boto3 is the runtime's. The same sources and pins give the same bytes, wherever and whenever Python 3.11
builds them. It is the lambdas' own, and compiles what it builds, since a lambda keeps no bytecode from one
cold start to the next; another Python leaves that out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dormouse.errors import DormouseError, InvalidInput, not_installed

Architecture = Literal["arm64", "x86_64"]
ROOT = Path(__file__).parents[1]
PACKAGES = ("commit", "compaction", "garbage", "maintenance", "migrate", "pause", "runs")
ARCHITECTURES: dict[str, Architecture] = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x86_64"}
PYTHON = "3.11"
SIZE_BYTES_MAX = 60 * 1024 * 1024

LIBRARIES = (
    "annotated-types", "aws-lambda-powertools", "aws-xray-sdk", "jmespath", "msgspec", "obstore", "psycopg",
    "psycopg-binary", "pydantic", "pydantic-core", "pydantic-settings", "python-dotenv", "typing-extensions",
    "typing-inspection", "wrapt",
)  # fmt: skip
"""With all that they need but botocore; requirements.txt has their versions."""

GLIBC = (28, 27, 26, 24, 17)
"""What the runtime has, and what wheels ask for; pip takes each name literally."""

ELSEWHERE = frozenset(
    {
        "cli", "compaction", "console", "data", "demo", "embedded_postgres", "embedded_server", "engine",
        "ingesting", "query", "spark", "splitting",
    }
)  # fmt: skip
"""Parts of the package that no lambda comes near."""

_SOURCES = (".py", ".sql", ".pem", ".toml")
_PRUNED_FOLDERS = {"__pycache__", "tests", "test", "bin"}
_PRUNED_ENDINGS = (".pyc", ".pyi", ".pyx", ".pxd", ".c", ".h")
_MTIME = 1_577_836_800  # 2020; zip files know none before 1980
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)$", re.MULTILINE)


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


def native() -> Architecture:
    """This machine's architecture, as AWS calls it."""
    try:
        return ARCHITECTURES[platform.machine()]
    except KeyError:
        raise InvalidInput(f"there are no lambdas for {platform.machine()}: name an --architecture") from None


def build(root: Path, target: Path, architecture: Architecture) -> bool:
    """Builds all packages of an architecture into `<target>/lambdas`; False when nothing has changed.

    Raises DormouseError when the libraries cannot be downloaded.
    """
    pins = library_pins((root / "requirements.txt").read_text("utf-8"))
    sources = {path.relative_to(root): path for path in source_files(root)}
    stamp = target / "lambdas" / f".{architecture}"
    digest = _digest([architecture, *pins], [*sources.values(), Path(__file__)])
    folders = {name: target / "lambdas" / f"{name}-{architecture}" for name in PACKAGES}
    if stamp.exists() and stamp.read_text() == digest and all(map(Path.is_dir, folders.values())):
        return False
    libraries = _libraries(target / "cache", architecture, pins)
    for name, folder in folders.items():
        wanted = {path: source for path, source in sources.items() if _is_of(path, name)}
        _assemble(folder, libraries, wanted)
    stamp.write_text(digest)
    return True


def library_pins(requirements: str) -> list[str]:
    """The lines of requirements.txt that the lambdas need."""
    pins = dict(_PIN.findall(requirements))
    if missing := [name for name in LIBRARIES if name not in pins]:
        raise InvalidInput(f"requirements.txt does not pin {', '.join(missing)}: run make requirements")
    return [f"{name}=={pins[name]}" for name in LIBRARIES]


def source_files(root: Path) -> Iterator[Path]:
    """The files of `dormouse` and `lambdas` that lambdas need, in order."""
    for path in sorted([*(root / "dormouse").rglob("*"), *(root / "lambdas").glob("*")]):
        parts = path.relative_to(root).parts
        is_elsewhere = parts[0] == "dormouse" and parts[1].removesuffix(".py") in ELSEWHERE
        if path.is_file() and path.suffix in _SOURCES and "__pycache__" not in parts and not is_elsewhere:
            yield path


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


def _libraries(cache: Path, architecture: Architecture, pins: list[str]) -> Path:
    """A folder with the libraries, downloaded once; packages link to its files."""
    folder = cache / f"lambdas-{architecture}-{_digest([PYTHON, *pins], [Path(__file__)])[:16]}"
    if folder.is_dir():
        return folder
    for old in cache.glob(f"lambdas-{architecture}-*"):
        shutil.rmtree(old)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        _install(Path(work) / "all", architecture, pins)
        _prune(Path(work) / "all")
        _compile(Path(work) / "all")
        (Path(work) / "all").rename(folder)
    return folder


def _install(target: Path, architecture: Architecture, pins: list[str]) -> None:
    machine = "aarch64" if architecture == "arm64" else architecture
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}"]
    options = [option for name in platforms for option in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-compile", "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON,
        "--target", str(target), *options, *pins,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise DormouseError(f"the libraries of the lambdas cannot be installed: {reason}")


def _prune(folder: Path) -> None:
    """Leaves out what is never imported, and what differs from one installation to the next."""
    for path in sorted(folder.rglob("*"), reverse=True):
        in_metadata = path.parent.suffix == ".dist-info"
        if path.is_dir() and not path.is_symlink():
            if path.name in _PRUNED_FOLDERS or not any(path.iterdir()):
                shutil.rmtree(path)
        elif path.name.endswith(_PRUNED_ENDINGS) or (in_metadata and path.name != "METADATA"):
            path.unlink()


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
    """Whole or not at all: in a folder beside it, which then takes its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "made"
        shutil.copytree(libraries, made, copy_function=os.link)
        for path, source in sources.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, made / path)
        _compile(*(made / name for name in {path.parts[0] for path in sources}))
        for path in [made, *made.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (_MTIME, _MTIME))
        if folder.exists():
            folder.rename(Path(work) / "old")
        made.rename(folder)


def _digest(texts: Iterable[str], files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text}\n".encode())
    for path in files:
        digest.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


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
