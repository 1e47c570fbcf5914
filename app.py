"""The CDK app: it reads the settings, creates the stacks and synthesizes them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dormouse.errors import InvalidInput
from stacks.node import use_bundled_node

if TYPE_CHECKING:
    import aws_cdk as cdk

ROOT = Path(__file__).parent
DEFAULT_CONFIG = ROOT / "config/dev.toml"


def main() -> int:
    """Returns 0, or 2 for bad settings; names packages that are not built and uses placeholders for them."""
    if len(sys.argv) > 1:
        print("app.py takes no arguments: use npx cdk synth -c config=…", file=sys.stderr)  # noqa: T201
        return 2
    use_bundled_node()
    from dormouse.settings.config_file import load
    from dormouse.settings.section import no_certificates
    from stacks.assets import Assets, BuiltAssets, refuse_deploys
    from stacks.instance import build, new_app, not_built

    # the CDK's command line sets CDK_OUTDIR; otherwise use its default folder
    app = new_app(None if "CDK_OUTDIR" in os.environ else "cdk.out")
    with tempfile.TemporaryDirectory() as stubs:
        try:
            settings = load(app.node.try_get_context("config") or DEFAULT_CONFIG)
            region = os.environ.get("CDK_DEFAULT_REGION")  # the region of the credentials
            if settings.region is None and region and (trouble := no_certificates(region)):
                raise InvalidInput(trouble)
            if app.node.try_get_context("packages") == "none":
                # an instance can be destroyed without built packages
                build(settings, assets=Assets(Path(stubs)), app=app)
                refuse_deploys(app, "with packages=none there is nothing to deploy")
            else:
                assets = BuiltAssets(ROOT, settings.architecture, Path(stubs))
                build(settings, assets=assets, app=app)
                if assets.to_run:
                    print(not_built(assets), file=sys.stderr)  # noqa: T201
        except InvalidInput as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 2
        return synthesized(app)


def synthesized(app: cdk.App) -> int:
    """Returns 0, or 2 if CloudFormation would refuse a template."""
    try:
        app.synth()
    except RuntimeError as error:
        if "ValidationFailed" not in str(error):
            raise
        return 2  # the reason is printed already
    return 0


if __name__ == "__main__":
    sys.exit(main())
