"""Writes docs/reference/deployment-settings.md from the models, for `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from dormouse.settings.toml_tables import Table, allowed, literal, tables

FILE = Path("docs/reference/deployment-settings.md")

HEAD = """# Settings of a deployment

<!-- Made by `make docs` from dormouse/settings: change the models, not this file. -->

One TOML file describes one instance; `config/` has three to begin with, `cdk deploy --all -c config=FILE`
deploys it. All that is wrong with a file is reported at once, before anything is deployed. A key that is
not listed here is an error. `dormouse doctor --config FILE` checks the file against the account,
`dormouse cost --config FILE` estimates what it costs.

The last column says what a change needs:

- _deploy_: `cdk deploy`; nothing is replaced. A change of the database's class, kind or version
  interrupts it for about a minute. An EMR Serverless application must be stopped when its architecture or
  limits change: deploy while nothing runs, or after `dormouse pause`.
- _replacement_: a new resource in place of the old. A new `id`, `account` or `region` is another
  instance, beside the old one. The network cannot be replaced while the database is in it: deploy another
  instance, and restore a backup there. A new e-mail address has to confirm its subscription, and a new
  engine of compaction takes the place of the old when no run is under way.
"""


def render() -> str:
    """The page."""
    return "\n".join([HEAD, *(_section(table) for table in tables())])


def _section(table: Table) -> str:
    title = f"`[{table.key}]`" if table.key else "The file itself"
    if table.kind:
        title += f' with `{table.kind[0]} = "{table.kind[1]}"`'
    rows = [_row(name, node) for name, node in table.properties.items()]
    optional = " Deployed when the table is in the file; it may be empty." if table.optional else ""
    if not table.key:
        about = (
            "Above the first table. What is not said to be deployed by its table has defaults if left out."
        )
    else:
        about = _line(table.description) + optional
    head = [
        "| setting | type | allowed | default | meaning | a change needs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([f"## {title}", "", about, "", *head, *rows, ""])


def _row(name: str, node: dict[str, Any]) -> str:
    kind, words = _type_and_range(node)
    default = "required" if "default" not in node else _default(node["default"])
    cells = [f"`{name}`", kind, words, default, _line(node["description"]), f"_{node['change']}_"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type_and_range(node: dict[str, Any]) -> tuple[str, str]:
    words = allowed(node)
    for kind in ("a whole number", "a number", "text in quotes", "a list", "a table"):
        if words.startswith(kind):
            rest = words.removeprefix(kind).lstrip(",: ").replace(" in quotes", "")
            name = re.sub("^a ", "", kind).removesuffix(" in quotes")
            return name, re.sub(r"^each text: ", "each ", rest) or "any"
    if words == "true or false":
        return "truth", "`true` or `false`"
    return ("text" if words.startswith('"') else "whole number"), re.sub(r'("[^"]*"|\d+)', r"`\1`", words)


def _default(value: Any) -> str:
    return "none" if value is None or value in ([], {}) else f"`{literal(value)}`"


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(), "utf-8")
