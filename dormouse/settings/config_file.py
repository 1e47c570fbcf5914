"""Reads the file of a deployment's settings; of what is wrong with it, everything is said at once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dormouse.errors import InvalidInput
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.problems import problems_of

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
