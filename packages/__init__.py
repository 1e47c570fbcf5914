"""The contents of the packages for lambdas, EMR and the query service's image: pinned wheels and sources.

Builds are reproducible: the same sources and pins give the same bytes on any machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from dormouse.errors import DormouseError, InvalidInput, pip_install

Architecture = Literal["arm64", "x86_64"]
ROOT = Path(__file__).parents[1]
ARCHITECTURES: dict[str, Architecture] = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x86_64"}


@dataclass(frozen=True)
class Runtime:
    """A platform for which packages are built, for either architecture."""

    full_version: str
    """The oldest patch release of Python on the platform, by which markers of requirements are evaluated."""

    glibc_minor: int
    """The minor version of glibc on the platform, such as 34 for 2.34. Wheels for newer versions are not
    installed."""

    @property
    def python(self) -> str:
        """The version of Python, such as `3.11`."""
        return self.full_version.rpartition(".")[0]

    @property
    def markers(self) -> dict[str, str]:
        """The values of the environment markers of requirements on this platform."""
        return {
            "extra": "",
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": self.full_version,
            "python_version": self.python,
            "sys_platform": "linux",
        }


LAMBDA = Runtime("3.13.0", 34)
"""The platform of the lambdas: AWS's runtime python3.13, on Amazon Linux 2023."""

SPARK = Runtime("3.11.14", 28)
"""The platform of Spark on EMR, and of the image of the query service."""

PRUNED = (
    "**/__pycache__", "**/tests", "**/test", "**/bin",
    "**/*.pyc", "**/*.pyi", "**/*.pyx", "**/*.pxd", "**/*.a", "**/*.c", "**/*.cc", "**/*.h",
    "*.dist-info/*",
)  # fmt: skip
"""Patterns of files that are never imported, or that differ between installations. METADATA and licenses
stay."""

FIXED_TIME = 1_577_836_800  # 2020; zip files cannot store years before 1980
_SOURCES = (".py", ".sql", ".pem", ".toml", ".typed", ".properties")
_PIN = re.compile(r"^([a-z0-9-]+)==((?:.*\\\n)*.*)", re.MULTILINE)
"""A pin in requirements.txt, followed by lines with the hashes of its files."""


def native() -> Architecture:
    """Returns this machine's architecture by AWS's name.

    Raises `InvalidInput` if AWS offers no such architecture.
    """
    try:
        return ARCHITECTURES[platform.machine()]
    except KeyError:
        raise InvalidInput(
            f"packages cannot be built for {platform.machine()}: give an --architecture"
        ) from None


def home(root: Path) -> Path:
    """Returns the folder of the package `dormouse`: in the checkout, or beside the installed sources."""
    if (root / "dormouse").is_dir():
        return root
    import dormouse

    return Path(dormouse.__file__).parents[1]


def requirements(root: Path, *extras: str) -> list[str]:
    """Returns the requirements of the package and of some of its extras, from pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(one for extra in extras for one in optional[extra])]


@cache
def interpreter(runtime: Runtime) -> Path | None:
    """Returns a Python interpreter of the platform's version on this machine, or None if there is none.

    It is the running one, or else one on the PATH or one that pyenv or uv installed.
    """
    if sys.version_info[:2] == tuple(map(int, runtime.python.split("."))):
        return Path(sys.executable)
    on_path = shutil.which(f"python{runtime.python}")
    kept = (
        *Path.home().glob(f".pyenv/versions/{runtime.python}.*/bin/python{runtime.python}"),
        *Path.home().glob(f".local/share/uv/python/cpython-{runtime.python}.*/bin/python{runtime.python}"),
    )
    # what pyenv puts on the PATH may be there and not start
    found = [*([Path(on_path)] if on_path else []), *sorted(kept)]
    return next((one for one in found if _starts(one)), None)


def _starts(python: Path) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def closure(requirements: Iterable[str], runtime: Runtime, without: Collection[str] = ()) -> set[str]:
    """Returns the names of the required packages and of all their dependencies on the platform.

    Packages in `without`, and dependencies that only they need, are left out.
    """
    found: set[tuple[str, str]] = set()
    pending = [(Requirement(one), "") for one in requirements]
    while pending:
        one, extra = pending.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        needed = one.marker is None or one.marker.evaluate({**runtime.markers, "extra": extra})
        if not needed or name in without:
            continue
        for wanted in {"", *one.extras}:
            if (name, wanted) not in found:
                found.add((name, wanted))
                pending += [(Requirement(each), wanted) for each in _requires(name)]
    return {name for name, _ in found}


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        installs = pip_install("lambdas", "query", "sql", "service")
        raise InvalidInput(f"{name} is not installed: run make .venv/.installed, or {installs}") from None


def pins(requirements: str, names: Iterable[str]) -> list[str]:
    """Returns the pins of packages from the text of a requirements.txt, each with the hashes for pip."""
    known = {name: " ".join(pin.replace("\\\n", " ").split()) for name, pin in _PIN.findall(requirements)}
    names = sorted(names)
    if missing := [name for name in names if name not in known]:
        raise InvalidInput(f"requirements.txt does not pin {', '.join(missing)}: run make requirements")
    return [f"{name}=={known[name]}" for name in names]


def install(
    target: Path, architecture: Architecture, runtime: Runtime, pins: Iterable[str], *pruned: str
) -> None:
    """Installs the wheels of exactly the pinned versions for the platform.

    Deletes files that no import needs.
    """
    machine = "aarch64" if architecture == "arm64" else architecture
    # pip takes each name literally
    glibc = range(runtime.glibc_minor, 16, -1)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in glibc] + [f"manylinux2014_{machine}"]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-compile", "--only-binary=:all:", "--implementation", "cp", "--python-version", runtime.python,
        "--target", str(target), *(word for name in platforms for word in ("--platform", name)),
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        pinned.write("".join(f"{pin}\n" for pin in pins))
        pinned.flush()
        command += ["--require-hashes", "--requirement", pinned.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DormouseError(f"the libraries cannot be installed: {' '.join(done.stderr.split())}")
    for path in sorted({path for pattern in (*PRUNED, *pruned) for path in target.glob(pattern)}):
        stays = path.parent.suffix == ".dist-info" and path.name in {"METADATA", "licenses"}
        if path.is_dir() and not stays:
            shutil.rmtree(path)
        elif path.is_file() and not stays:
            path.unlink()
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def sources(folder: Path, elsewhere: Collection[str] = ()) -> Iterator[Path]:
    """Yields the source files of a package in order, without the folders and modules in `elsewhere`."""
    for path in sorted(folder.rglob("*")):
        within = path.relative_to(folder)
        skipped = "__pycache__" in within.parts or within.parts[0] in elsewhere or str(within) in elsewhere
        if path.is_file() and path.suffix in _SOURCES and not skipped:
            yield path


@contextmanager
def whole(folder: Path, program: str = "") -> Iterator[Path]:
    """Yields an empty folder for the caller to fill, which at the end replaces `folder` in one step.

    All files get a fixed time and mode. Only the file named `program` is executable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        yield made
        for path in [made, *made.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.name == program else 0o644)
            os.utime(path, (FIXED_TIME, FIXED_TIME))
        if folder.exists():
            folder.rename(Path(work) / "old")
        made.rename(folder)


def copy(made: Path, files: Iterable[tuple[Path, Path]]) -> None:
    """Copies each source file to its path in the folder `made`."""
    for source, path in files:
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, made / path)


def digest(texts: Iterable[str], files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{text}\n".encode())
    for path in files:
        found.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
