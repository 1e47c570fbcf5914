"""The words and openings that plain English leaves out, looked up in code and pages.

`python -m tests.words PATH...` lists what it finds there.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.parsed import statements, tree

BANNED = re.compile(
    r"\b(who|whom|whoever|whomever|nobody|somebody|anybody|everybody|told|heeds?|heeded|heeding|mends?|mended|mending"
    r"|for ever|says? so|said so|(?:is|are|was|were|be|been|being|has|had) gone|(?:is|are|was|be) let be)\b",
    re.IGNORECASE,
)
LISTED = re.compile(
    r"\b(who|whom|whoever|whomever|nobody|somebody|anybody|everybody|told|heed(s|ed|ing)?|mend(s|ed|ing)?"
    r"|ever|says?|said|gone|let)\b",
    re.IGNORECASE,
)
"""A word of each banned expression. An expression may be divided between two strings."""
SUSPECT = re.compile(f"#.*{BANNED.pattern}", BANNED.flags)
OPENINGS = re.compile(
    r"^(What|Whether|Which|Those|Of|As|How|Where|Who|Whose|Why|When|Whatever|Whoever|If|By|So|Also|For|From|In|On|To"
    r"|With|Without|Till|Until|Such|But|And|Or|One that|That|Has the|Lets?)\b"
)
QUANTITIES = re.compile(r"^How (long|many|often|far|old|late)\b")
"""Openings that an attribute with a number may have."""
VERB = re.compile(r"^[A-Z][a-z]+s\b")
NOT_VERBS = frozenset(
    name
    for names in (
        ("Across", "Always", "As", "Bytes", "Class", "Columns", "Files", "Its", "Keys", "Less", "Names"),
        ("Others", "Perhaps", "Process", "Rows", "This", "Thus", "Values"),
    )
    for name in names
)
RIDDLES = frozenset({"told", "_told", "_shown", "asked", "found", "also", "one", "it", "those"})
"""Names of functions and of parameters that say nothing of what they do or hold."""
NOUNS_MAY_OPEN = frozenset({"property", "cached_property", "command", "callback"})
"""Decorators of functions whose docstrings are noun phrases, or the help texts of commands."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """A place, and the rule that its text breaks."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text[:100]}"


def faults(path: Path) -> Iterator[Fault]:
    """Yields what breaks a rule in a Python file, in the comments of an SQL file or in a page."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield from _in_python(path, text)
    elif path.suffix == ".sql":
        for number, line in enumerate(text.splitlines(), 1):
            yield from _words(path, number, line.partition("--")[2])
    elif path.suffix == ".md":
        yield from _in_page(path, text)


def _in_page(path: Path, text: str) -> Iterator[Fault]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield from _words(path, number, line)


def _in_python(path: Path, text: str) -> Iterator[Fault]:
    # to walk through expressions takes long
    of_file = ast.walk(tree(path)) if LISTED.search(text) else (node for node, _, _ in statements(path))
    for node in of_file:
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            yield from _docstring(path, node)
        if isinstance(node, (ast.Module, ast.ClassDef)):
            yield from _attributes(path, node)
        if isinstance(node, FUNCTIONS):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            for name in {node.name, *names} & RIDDLES:
                yield Fault(path, node.lineno, "name", f"{node.name}: {name}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield from _words(path, node.lineno, node.value)
    # tokens take long to read, and few files have a banned word after a "#"
    tokens = tokenize.generate_tokens(io.StringIO(text).readline) if SUSPECT.search(text) else ()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            yield from _words(path, token.start[0], token.string)


def _docstring(path: Path, node: ast.Module | ast.ClassDef | Function) -> Iterator[Fault]:
    text = ast.get_docstring(node) or ""
    line = node.body[0].lineno
    if OPENINGS.match(text):
        yield Fault(path, line, "opening", text.splitlines()[0])
    elif isinstance(node, FUNCTIONS) and "tests" not in path.parts and not _may_open_with_a_noun(node):
        yield from _verb(path, line, text)


def _attributes(path: Path, node: ast.Module | ast.ClassDef) -> Iterator[Fault]:
    """Yields faults of the texts below assignments, which describe attributes and constants."""
    for before, after in pairwise(node.body):
        if isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr):
            text = str(getattr(after.value, "value", ""))
            if OPENINGS.match(text) and not QUANTITIES.match(text):
                yield Fault(path, after.lineno, "opening", text.splitlines()[0])


def _verb(path: Path, line: int, text: str) -> Iterator[Fault]:
    if not VERB.match(text) or text.split(maxsplit=1)[0] in NOT_VERBS:
        yield Fault(path, line, "verb", text.splitlines()[0])


def _may_open_with_a_noun(node: Function) -> bool:
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}
    return bool(names & NOUNS_MAY_OPEN)


def _words(path: Path, line: int, text: str) -> Iterator[Fault]:
    text = re.sub(r"`[^`]*`", lambda code: " " * len(code.group()), text)
    for match in BANNED.finditer(text):
        around = text[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
        yield Fault(path, line + text.count("\n", 0, match.start()), match.group().lower(), around)


def texts(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the files at paths, and in folders those with texts for readers."""
    for path in paths:
        within = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (each for each in within if each.suffix in {".py", ".sql", ".md"})


if __name__ == "__main__":
    listed = [str(fault) for path in texts(map(Path, sys.argv[1:])) for fault in faults(path)]
    print("\n".join([*listed, f"{len(listed)} faults"]))
