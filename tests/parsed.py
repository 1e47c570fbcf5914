"""The syntax trees of source files. Each file is parsed once for all tests that read the project's code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def statements(path: Path) -> tuple[tuple[ast.AST, bool, bool], ...]:
    """Returns the module and each statement of a file, with two flags.

    The first flag says that the statement runs only when a function is called. The second says that only type
    checkers read the statement. Expressions, which are most of a tree, are left out.
    """
    found = []
    pending: list[tuple[ast.AST, bool, bool]] = [(tree(path), False, False)]
    while pending:
        node, late, typing = pending.pop()
        found.append((node, late, typing))
        late = late or isinstance(node, ast.FunctionDef)
        typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for block in _BLOCKS:
            pending += [(child, late, typing) for child in getattr(node, block, ())]
    return tuple(found)


def forget() -> None:
    """Frees all trees, which take hundreds of megabytes."""
    tree.cache_clear()
    statements.cache_clear()
