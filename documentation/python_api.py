"""The page about the Python API, generated from the docstrings of `import dormouse as dm`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import dormouse as dm
from documentation import made_of
from dormouse.api.transaction import Transaction
from dormouse.client.client import Client, RemoteTable
from dormouse.client.payloads import RemotePayloads
from dormouse.jobs import JobStore
from dormouse.payloads import PayloadStore
from dormouse.state.history.history import History

_HEAD = """# The Python API

{made}

This page lists the public names of `import dormouse as dm`. They are kept from release to release, and the
[changelog](../../CHANGELOG.md) announces any change. Other names may change at any time.
"""
_BESIDE = {
    "A transaction: `instance.transaction()`": Transaction,
    "The history of a table: `table.history`": History,
    "Payloads: `instance.payloads`": PayloadStore,
    "Jobs: `instance.jobs`": JobStore,
    "The client of a query service: `dormouse.client.connect(url)`": Client,
    "A table of a query service: `client.table(name)`": RemoteTable,
    "Payloads of a query service: `client.payloads`": RemotePayloads,
}
_RAISED = BaseException


def render() -> str:
    names = [name for name in dm.__all__ if name != "errors"]
    found = {name: getattr(dm, name) for name in sorted(names, key=str.lower)}
    functions = {name: each for name, each in found.items() if inspect.isfunction(each)}
    classes = {name: each for name, each in found.items() if inspect.isclass(each)}
    classes = {name: each for name, each in classes.items() if not issubclass(each, _RAISED)}
    values = [name for name in found if name not in functions and name not in classes]
    parts = [_HEAD.format(made=made_of("docstrings"))]
    parts += [_function(f"dm.{name}", each, "##") for name, each in functions.items()]
    parts += [part for name, each in classes.items() for part in _class(f"`dm.{name}`", each)]
    parts += [part for title, each in _BESIDE.items() for part in _class(title, each)]
    parts.append(f"## Types and values\n\n{', '.join(f'`dm.{n}`' for n in values)}: see [types](types.md).\n")
    parts.append("## Errors\n\n`dm.DormouseError` is the root of [all of them](errors.md).\n")
    return "\n".join(parts)


def _class(title: str, each: type) -> Iterator[str]:
    yield f"## {title}\n\n{_doc(each)}\n"
    for name in dir(each):
        member = inspect.getattr_static(each, name)
        if name.startswith("_") or name.startswith("model_") or not _is_ours(member, each):
            continue
        if isinstance(member, property):
            yield f"### `.{name}`\n\n{_doc(member)}\n"
        elif callable(getattr(each, name)):
            yield _function(f".{name}", getattr(each, name), "###")


def _is_ours(member: Any, owner: type) -> bool:
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return (
        inspect.isfunction(function) and function.__module__.startswith("dormouse") and bool(_doc(function))
    )


def _function(name: str, function: Any, level: str) -> str:
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
    ]
    signature = re.sub(r"<function .*? at 0x\w+>", "…", str(inspect.Signature(parameters)))
    return f"{level} `{name}{signature}`\n\n{_doc(function)}\n"


def _doc(each: Any) -> str:
    # the tests of the documentation take a name that ends with .sql for a file
    return (inspect.getdoc(each) or "").replace("`Instance.sql`", "`Instance.sql(…)`")
