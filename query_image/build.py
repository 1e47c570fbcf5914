"""Makes build/query-image, the folder from which a deploy builds the image of the query service.

    python -m query_image.build

It has the Dockerfile, the package, and requirements.txt with exact versions of all that `dormouse serve`
and `dormouse committer` need. Builds are reproducible, and the folder is the same for all architectures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import packages
from dormouse.errors import DormouseError
from packages import ROOT, SPARK

FOLDER = Path("build/query-image")
EXTRAS = ("query", "sql", "service")
BESIDE = ("boto3", "botocore", "rich", "typer")
"""Libraries for the queues of SQS, for the IAM tokens of the database, and for the command line."""

ELSEWHERE = ("demo", "spark", "client", "embedded/postgres.py", "embedded/server.py")
"""Parts of the package that no service uses."""


def main() -> int:
    try:
        build(ROOT, ROOT / FOLDER)
    except DormouseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{FOLDER}: made")  # noqa: T201
    return 0


def build(root: Path, folder: Path) -> None:
    with packages.whole(folder, program="dormouse") as made:
        packages.copy(made, files(root))
        (made / "requirements.txt").write_text("".join(f"{pin}\n" for pin in pins(root)), "utf-8")


def files(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each file to copy, with its place in the folder."""
    for name in ("Dockerfile", "dormouse", "healthy"):
        yield root / "query_image" / name, Path(name)
    home = packages.home(root)
    for path in (home / "dormouse_command.py", *packages.sources(home / "dormouse", ELSEWHERE)):
        yield path, Path("package") / path.relative_to(home)


def pins(root: Path) -> list[str]:
    """Returns the pins of the requirements and of their dependencies, from requirements.txt."""
    wanted = packages.closure([*packages.requirements(root, *EXTRAS), *BESIDE], SPARK)
    return packages.pins((root / "requirements.txt").read_text("utf-8"), wanted)


if __name__ == "__main__":
    sys.exit(main())
