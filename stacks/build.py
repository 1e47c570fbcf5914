"""The command `python -m dormouse_cdk.build`, which builds the files that another CDK app uploads.

Run it in the folder of the app. In a checkout, `make lambdas emr-package query-image` does the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dormouse.errors import DormouseError
from stacks.home import SOURCES

PARTS = ("lambdas", "emr-package", "query-image")


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds missing and changed parts. Returns 0, or 1 when a part cannot be built."""
    parser = argparse.ArgumentParser(
        prog="python -m dormouse_cdk.build", description="Builds what an instance uploads."
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; all, if none is named")
    parser.add_argument("--architecture", choices=["arm64", "x86_64"], default="arm64")
    parser.add_argument("--into", type=Path, default=Path("build"), help="a folder; build, unless named")
    given = parser.parse_args(arguments)
    if unknown := [part for part in given.parts if part not in PARTS]:
        print(f"error: there is no part {unknown[0]}: name {', '.join(PARTS)}", file=sys.stderr)  # noqa: T201
        return 1
    try:
        for part in given.parts or PARTS:
            _build(part, given.architecture, given.into.resolve())
            print(f"{part}: built for {given.architecture} into {given.into}")  # noqa: T201
    except DormouseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _build(part: str, architecture: Literal["arm64", "x86_64"], into: Path) -> None:
    if str(SOURCES) not in sys.path:
        sys.path.insert(0, str(SOURCES))  # affects this process only, which ends after the build
    from emr.build import build as build_archive
    from lambdas.build import build as build_lambdas
    from query_image.build import build as build_image

    match part:
        case "lambdas":
            build_lambdas(SOURCES, into, architecture)
        case "emr-package":
            build_archive(architecture, into / "emr" / f"dormouse-{architecture}.tgz")
        case _:
            build_image(SOURCES, into / "query-image")


if __name__ == "__main__":
    sys.exit(main())
