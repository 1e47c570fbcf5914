"""The settings of a deployment, table by table, from the models that check its file."""

from __future__ import annotations

import re
from typing import Any

from documentation import cell
from dormouse.settings.config_file import Table, allowed, literal, tables

_HEAD = """# Settings of a deployment

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
    """Returns the text of the page."""
    return "\n".join([_HEAD, *(_section(table) for table in tables())])


def _section(table: Table) -> str:
    title = f"`[{table.key}]`" if table.key else "The file itself"
    if table.kind:
        title += f' with `{table.kind[0]} = "{table.kind[1]}"`'
    rows = [_row(name, node) for name, node in table.properties.items()]
    about = "Above the first table. What is not said to be deployed by its table has defaults if left out."
    if table.key:
        about = " ".join(table.description.split())
    if table.optional:
        about += " Deployed when the table is in the file; it may be empty."
    head = [
        "| setting | type | allowed | default | meaning | a change needs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([f"## {title}", "", about, "", *head, *rows, ""])


def _row(name: str, node: dict[str, Any]) -> str:
    kind, words = _type_and_range(node)
    default = "required" if "default" not in node else _default(node["default"])
    cells = [f"`{name}`", kind, words, default, node["description"], f"_{node['change']}_"]
    return f"| {' | '.join(map(cell, cells))} |"


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
