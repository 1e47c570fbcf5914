"""Texts without the paths of this machine, for readers who only know the names of objects."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

STORE = "the object store"
_REST = r"""(?:/[^\s'"]*)?"""


@lru_cache(maxsize=16)
def hiding(url: str) -> Callable[[str], str]:
    """Returns a function that takes the paths of this machine out of a text.

    `url` is that of the object store. Of a path in a store that is a folder, the object's name is left.
    """
    folders: list[tuple[re.Pattern[str], str]] = []
    if url.startswith("file:"):
        root = Path(unquote(urlsplit(url).path))
        for text in dict.fromkeys((root.as_uri(), str(root), str(root.resolve()))):
            folders.append((re.compile(re.escape(text) + r"/(?=[\w.])"), ""))
            folders.append((re.compile(re.escape(text) + r"(?![\w.-])/?"), STORE))
        if len(root.parts) > 2:  # beside the objects of a local instance is its database
            folders.append((re.compile(re.escape(str(root.parent)) + _REST), "a folder of the service"))
    for folder in dict.fromkeys((tempfile.gettempdir(), str(Path(tempfile.gettempdir()).resolve()))):
        folders.append((re.compile(r"(?<![\w/])" + re.escape(folder) + _REST), "a temporary file"))

    for folder in _code_folders():
        folders.append((re.compile(r"(?<![\w/])" + re.escape(folder) + "/"), ""))

    def hide(text: str) -> str:
        for pattern, instead in folders:
            text = pattern.sub(instead, text)
        return text

    return hide


def _code_folders() -> list[str]:
    """Returns the folders in which tracebacks find code, those within others first."""
    package = Path(__file__).parents[2]
    found = {str(package), sys.prefix, sys.base_prefix, *filter(os.path.isabs, sys.path)}
    return sorted((one.rstrip("/") for one in found if len(Path(one).parts) > 2), key=len, reverse=True)


def without_paths(found: Any, hide: Callable[[str], str]) -> Any:
    """Returns a JSON value whose texts name no path of this machine."""
    if isinstance(found, str):
        return hide(found)
    if isinstance(found, Mapping):
        return {name: without_paths(value, hide) for name, value in found.items()}
    return [without_paths(one, hide) for one in found] if isinstance(found, list | tuple) else found
