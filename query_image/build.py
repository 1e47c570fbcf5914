"""Makes build/query-image, the folder that a deploy builds the image of the query service from.

    python -m query_image.build

It has the Dockerfile, requirements.txt with exact versions of all that `dormouse serve` needs, and the
package. The same sources and pins give the same folder; it is the same for all architectures.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from dormouse.errors import DormouseError, InvalidInput

ROOT = Path(__file__).parents[1]
FOLDER = Path("build/query-image")
EXTRAS = ("query", "service")
BESIDE = ("botocore", "rich", "typer")
"""The IAM tokens of the database, and the command line."""

TARGET = {
    "extra": "",
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.14",
    "python_version": "3.11",
    "sys_platform": "linux",
}
"""The image, for markers of requirements; whichever machine, as wheels of both are the same in this."""

ELSEWHERE = ("demo", "spark", "client", "embedded_postgres.py", "embedded_server.py")
"""Parts of the package that the service never comes near."""

_SOURCES = (".py", ".sql", ".pem", ".toml", ".typed")
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


def main() -> int:
    try:
        build(ROOT, ROOT / FOLDER)
    except DormouseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{FOLDER}: made")  # noqa: T201
    return 0


def build(root: Path, folder: Path) -> None:
    """Whole or not at all: in a folder beside it, which then takes its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "made"
        for source, path in files(root):
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, made / path)
        (made / "requirements.txt").write_text("".join(f"{pin}\n" for pin in pins(root)), "utf-8")
        for path in [made, *made.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path == made / "dormouse" else 0o644)
        if folder.exists():
            folder.rename(Path(work) / "old")
        made.rename(folder)


def files(root: Path) -> Iterator[tuple[Path, Path]]:
    """What is copied, and to where in the folder."""
    for name in ("Dockerfile", "dormouse"):
        yield root / "query_image" / name, Path(name)
    for path in sorted([root / "dormouse_command.py", *(root / "dormouse").rglob("*")]):
        parts = path.relative_to(root).parts
        is_elsewhere = len(parts) > 1 and parts[1] in ELSEWHERE
        if path.is_file() and path.suffix in _SOURCES and "__pycache__" not in parts and not is_elsewhere:
            yield path, Path("package").joinpath(*parts)


def pins(root: Path) -> list[str]:
    """All that is needed, with the versions of requirements.txt; what is installed says who needs what."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *BESIDE]
    wanted += [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    known = dict(_PIN.findall((root / "requirements.txt").read_text("utf-8")))
    names = sorted(closure(wanted))
    if missing := [name for name in names if name not in known]:
        raise InvalidInput(f"requirements.txt does not pin {', '.join(missing)}: run make requirements")
    return [f"{name}=={known[name]}" for name in names]


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of what is required, and of all that that requires on the image."""
    found: set[tuple[str, str]] = set()
    pending = [(Requirement(one), "") for one in requirements]
    while pending:
        one, extra = pending.pop()
        if one.marker is not None and not one.marker.evaluate({**TARGET, "extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        for wanted in {"", *one.extras}:
            if (name, wanted) not in found:
                found.add((name, wanted))
                pending += [(Requirement(each), wanted) for each in _requires(name)]
    return {name for name, _ in found}


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        raise InvalidInput(f"{name} is not installed: run make .venv/.installed") from None


if __name__ == "__main__":
    sys.exit(main())
