"""The build of the lambdas: `python -m lambdas.build [--architecture arm64|x86_64|native] [--measure]`.

Each lambda has a folder, `build/lambdas/<name>-<architecture>/`, with only the modules that it imports. The
folder lacks boto3, which AWS's runtime contains. The same sources and pins give the same bytes on every
machine.

The build compiles the files to bytecode, since a lambda keeps no bytecode from one cold start to the next.
This needs the Python version of the lambdas. Without that version, the command prints a note and builds no
bytecode.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import dormouse
import packages
from dormouse.errors import DormouseError, not_installed
from packages import ARCHITECTURES, LAMBDA, ROOT, Architecture, native

POWERTOOLS = "aws-lambda-powertools[tracer]"
DATABASE, CALLS = "database", "calls"
KINDS = {
    DATABASE: ("commit", "compaction", "garbage", "maintenance", "migrate", "tables"),
    CALLS: ("pause", "runs"),
}
"""The names of the lambdas by kind: lambdas that use the database, and lambdas that only call AWS."""

PACKAGES = tuple(sorted(name for names in KINDS.values() for name in names))
REQUIRED = {
    DATABASE: [*packages.requirements(ROOT), POWERTOOLS],
    CALLS: ["pydantic", "pydantic-settings", POWERTOOLS],
}
LIBRARIES = {
    kind: sorted(packages.closure(required, LAMBDA, {"botocore"})) for kind, required in REQUIRED.items()
}
"""The libraries of each kind with all their dependencies, without botocore, which AWS's runtime contains."""

DATA = Path(dormouse.__file__).with_name("data")
"""The folder `dormouse/data` of the checkout or of the installed package."""

OF_DATA = {"__init__.py", "transform.py"}
"""The modules of the folder `dormouse/data` that check the properties of a table. They need no library."""

ELSEWHERE = frozenset(
    {
        "cli", "client", "demo", "reading", "service", "sources", "spark", "writing",
        "embedded/postgres.py", "embedded/server.py",
        *(f"data/{one.name}" for one in DATA.glob("*.py") if one.name not in OF_DATA),
    }
)  # fmt: skip
"""The parts of the package dormouse that no lambda imports."""

OF_CALLS = frozenset(
    {
        "__init__.py", "errors", "settings", "aws", "model/__init__.py", "model/loops.py",
        "state/__init__.py", "state/commits/__init__.py", "state/commits/queue.py",
        "state/commits/sqs_queue.py",
    }
)  # fmt: skip
"""The only parts of the package dormouse that are imported by lambdas that only call AWS."""

OF_CUSTOM_RESOURCES = {"migrate", "pause"}
"""The lambdas that answer CloudFormation as custom resources."""

NEVER_IMPORTED = ("_cffi.*.so", "backend_cffi.*")
"""The files of zstandard that only other Python implementations import. They have 12 MB."""

NO_PYTHON = (
    f"there is no Python {LAMBDA.python}, which the lambdas run on: put python{LAMBDA.python} on the PATH"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lambdas.build", description="Builds the lambdas.")
    parser.add_argument("--architecture", choices=["arm64", "x86_64", "native", "all"], default="all")
    parser.add_argument("--measure", action="store_true", help="also print sizes and times of cold imports")
    given = parser.parse_args(arguments)
    try:
        for architecture in _architectures(given.architecture):
            built = build(ROOT, ROOT / "build", architecture)
            print(f"{len(PACKAGES)} packages for {architecture}: {'built' if built else 'nothing changed'}")  # noqa: T201
        if packages.interpreter(LAMBDA) is None:
            print(f"bytecode is left out, so cold starts take longer: {NO_PYTHON}")  # noqa: T201
        if given.measure:
            _print_measures(ROOT / "build", native())
    except DormouseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def build(root: Path, target: Path, architecture: Architecture) -> bool:
    """Builds all packages of an architecture into `<target>/lambdas`. Returns False if nothing has changed.

    Raises `DormouseError` if the libraries cannot be downloaded.
    """
    requirements = (root / "requirements.txt").read_text("utf-8")
    pins = {kind: packages.pins(requirements, names) for kind, names in LIBRARIES.items()}
    sources = source_files(root)
    code = [Path(__file__), Path(packages.__file__)]
    python = packages.interpreter(LAMBDA)
    made_by = [architecture, "compiled" if python else "not compiled"]
    stamp = target / "lambdas" / f".{architecture}"
    digest = packages.digest([*made_by, *pins[DATABASE], *pins[CALLS]], [*sources.values(), *code])
    folders = {name: target / "lambdas" / f"{name}-{architecture}" for name in PACKAGES}
    if stamp.exists() and stamp.read_text() == digest and all(map(Path.is_dir, folders.values())):
        return False
    for kind, names in KINDS.items():
        version = packages.digest([*made_by, *pins[kind]], code)[:16]
        libraries = _libraries(target / "cache", f"{kind}-{architecture}", version, pins[kind])
        for name in names:
            wanted = {path: source for path, source in sources.items() if is_of(path, name, kind)}
            _assemble(folders[name], libraries, wanted)
    stamp.write_text(digest)
    return True


def source_files(root: Path) -> dict[Path, Path]:
    """Returns the source files of `dormouse` and `lambdas` that lambdas need, by their paths in a package."""
    home = packages.home(root)
    files = {path.relative_to(home): path for path in packages.sources(home / "dormouse", ELSEWHERE)}
    return files | {path.relative_to(root): path for path in packages.sources(root / "lambdas")}


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class ColdImport:
    """The cost of an import in a new process: CPU time in seconds, and the number of loaded modules."""

    seconds: float
    modules: int


def cold_import(folder: Path, module: str) -> ColdImport:
    """Measures the import of a module from a built package, in a new process of the lambdas' Python version.

    Only boto3 is beside the package. Raises `DormouseError` if the import fails, or if this machine lacks
    that Python.
    """
    if (python := packages.interpreter(LAMBDA)) is None:
        raise DormouseError(f"the packages cannot be tried: {NO_PYTHON}")
    script = """
import sys, time
sys.path[:] = [sys.argv[1], *(p for p in sys.path if "site-packages" not in p), sys.argv[2]]
began = time.process_time()
__import__(sys.argv[3])
print(time.process_time() - began, len(sys.modules))
"""
    with tempfile.TemporaryDirectory() as runtime:
        link_boto3(Path(runtime))
        command = [str(python), "-I", "-S", "-B", "-c", script, str(folder), runtime, module]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=runtime)
    if done.returncode:
        raise DormouseError(f"{module} of {folder} cannot be imported: {done.stderr.strip()}")
    seconds, modules = done.stdout.split()
    return ColdImport(float(seconds), int(modules))


def is_of(path: Path, name: str, kind: str) -> bool:
    """Returns whether a source file belongs in the package of a lambda of this name and kind."""
    if path.parts[0] == "lambdas":
        answers = ["answers"] if name in OF_CUSTOM_RESOURCES else []
        shared = [*answers, DATABASE] if kind == DATABASE else answers
        return path.stem in {"__init__", "services", name, *shared}
    return kind == DATABASE or not OF_CALLS.isdisjoint({path.parts[1], "/".join(path.parts[1:])})


def _architectures(given: str) -> list[Architecture]:
    if given == "all":
        return ["arm64", "x86_64"]
    return [native() if given == "native" else ARCHITECTURES[given]]


def _libraries(cache: Path, name: str, version: str, pins: list[str]) -> Path:
    """Returns the folder of the libraries, which are downloaded only once. Packages link to its files."""
    folder = cache / f"lambdas-{name}-{version}"
    if folder.is_dir():
        return folder
    for old in cache.glob(f"lambdas-{name}-*"):
        shutil.rmtree(old)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        packages.install(Path(work) / "all", ARCHITECTURES[name.rpartition("-")[2]], LAMBDA, pins)
        _compile(Path(work) / "all")
        (Path(work) / "all").rename(folder)
    return folder


def _compile(*folders: Path) -> None:
    """Compiles the files of folders to bytecode that Python never checks against the source.

    Does nothing if this machine lacks the lambdas' Python version.
    """
    if (python := packages.interpreter(LAMBDA)) is None:
        return
    for folder in sorted(folders):
        # in a new process: modules that are loaded already would change the bytes of the bytecode
        options = ["-q", "-j1", "--invalidation-mode", "unchecked-hash", "-s", str(folder.parent), "-p", "/"]
        command = [str(python), "-I", "-S", "-m", "compileall", *options, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DormouseError(f"{folder.name} cannot be compiled: {done.stdout.strip()}")


def _assemble(folder: Path, libraries: Path, sources: dict[Path, Path]) -> None:
    with packages.whole(folder) as made:
        leave = shutil.ignore_patterns(*NEVER_IMPORTED)
        shutil.copytree(libraries, made, copy_function=os.link, dirs_exist_ok=True, ignore=leave)
        packages.copy(made, ((source, path) for path, source in sources.items()))
        _compile(*(made / name for name in {path.parts[0] for path in sources}))


def link_boto3(folder: Path) -> None:
    """Links boto3 and its dependencies into a folder, to imitate AWS's runtime, which contains them."""
    from importlib.util import find_spec

    for name in ("boto3", "botocore", "s3transfer", "jmespath", "dateutil", "urllib3", "six"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise not_installed(name, "lambdas")
        origin = Path(spec.origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (folder / origin.name).symlink_to(origin)


def _print_measures(target: Path, architecture: Architecture) -> None:
    """Prints the size of each package, and the time of its cold import."""
    for name in PACKAGES:
        folder = target / "lambdas" / f"{name}-{architecture}"
        # the fastest of three: other work on this machine can only make an import slower
        imported = min(
            (cold_import(folder, f"lambdas.{name}") for _ in range(3)), key=lambda cold: cold.seconds
        )
        size = tree_bytes(folder) / 1024 / 1024
        cold = f"cold import {imported.seconds:.2f} s, {imported.modules} modules"
        print(f"{name:12} {size:5.1f} MB unpacked, {cold}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
