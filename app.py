"""The CDK app: reads the settings, creates the stacks, synthesizes."""

from __future__ import annotations

import sys

import aws_cdk as cdk

from dormouse.errors import InvalidInput
from dormouse.settings.config_file import load

DEFAULT_CONFIG = "config/dev.toml"


def main() -> int:
    app = cdk.App()
    try:
        load(app.node.try_get_context("config") or DEFAULT_CONFIG)
    except InvalidInput as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
