"""The CDK app: reads the settings, creates the stacks, synthesizes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dormouse.errors import InvalidInput
from stacks.node import use_bundled_node

ROOT = Path(__file__).parent
DEFAULT_CONFIG = ROOT / "config/dev.toml"


def main() -> int:
    """0, or 2 for what is wrong with the settings or not built."""
    if len(sys.argv) > 1:
        print("app.py takes no arguments: use npx cdk synth -c config=…", file=sys.stderr)  # noqa: T201
        return 2
    use_bundled_node()
    from dormouse.settings.config_file import load
    from stacks.assets import BuiltAssets
    from stacks.instance import build, new_app

    # Under the CLI, that says where; else where the CLI would put it.
    app = new_app(None if "CDK_OUTDIR" in os.environ else "cdk.out")
    try:
        settings = load(app.node.try_get_context("config") or DEFAULT_CONFIG)
        build(settings, assets=BuiltAssets(ROOT, settings.architecture), app=app)
    except InvalidInput as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    try:
        app.synth()
    except RuntimeError as error:
        if "ValidationFailed" not in str(error):
            raise
        return 2  # What CloudFormation would refuse is printed already.
    return 0


if __name__ == "__main__":
    sys.exit(main())
