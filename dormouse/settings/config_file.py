"""Reads the file of a deployment's settings; of what is wrong with it, everything is said at once."""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.problems import problems_of
from dormouse.settings.toml_tables import Table, allowed, literal, tables

# Writes docs/reference/deployment-settings.md from the models, for `make docs`.

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


FILES = Path("config")
BYTES_MAX = 1_000_000


def load(path: str | Path) -> DeploymentSettings:
    """The settings of a TOML file; raises InvalidInput, a line a problem: key, value, what is allowed."""
    name = str(path)
    try:
        content = tomllib.loads(_text(Path(path)))
    except InvalidInput:
        raise
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {name}{_others(Path(path))}") from None
    except OSError as error:
        raise InvalidInput(f"cannot read {name}: {error.strerror or error}") from None
    except RecursionError:
        raise InvalidInput(f"{name} is not TOML that can be read: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} is not TOML: it is not text in UTF-8") from None
    except ValueError as error:  # also what Python itself refuses, like a number of 5,000 digits
        raise InvalidInput(f"{_printable(name)} is not TOML: {_printable(str(error))}") from None
    return parse(content, name)


def parse(content: Mapping[str, Any], name: str = "settings") -> DeploymentSettings:
    """The settings of a document; `name` is what a message calls it."""
    settings, problems = problems_of(content)
    if settings is None:
        raise InvalidInput("\n".join(f"{name}: {problem}" for problem in problems))
    return settings


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is not a file: name a TOML file, like config/dev.toml{_others(path)}")
    with path.open("rb") as file:
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise InvalidInput(f"{path} has more than {BYTES_MAX:,} bytes: it is not a file of settings")
    return content.decode("utf-8-sig")


def _others(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    beside = sorted(one for one in folder.glob("*.toml") if one.name != "pyproject.toml")
    known = [str(one) for one in beside or sorted(FILES.glob("*.toml"))]
    near = difflib.get_close_matches(str(path), known, 1, 0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else ""


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(), "utf-8")
