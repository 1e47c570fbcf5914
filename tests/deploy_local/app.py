"""The CDK app of a run: the stacks of app.py, with the packages that were built for the run."""

from __future__ import annotations

import sys
from pathlib import Path

from dormouse.settings.config_file import load
from stacks.assets import BuiltAssets
from stacks.instance import build


def main(work: Path) -> None:
    settings = load(work / "local.toml")
    build(settings, assets=BuiltAssets(work / "checkout", settings.architecture, work / "stubs")).synth()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
