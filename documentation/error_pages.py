"""Every error: what it means, and what the command line and the query service make of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from documentation import cell, made_of
from dormouse import errors
from dormouse.cli.failures import exit_code_of
from dormouse.errors import DormouseError

_HEAD = """# Errors

{made}

All are in `dormouse.errors`. The message of each is one line that names the thing and says what to do; the
[runbook](../how-to/runbook.md) has what to do about those that tell of trouble. The command line ends with the exit code; with
`--json` it tells the name. Over HTTP the type of a problem document is `urn:dormouse:` and the name in lower case, like
`urn:dormouse:table-not-found`.

What the message names, a program reads of the error's fields. A field is None where it is not known. Problem documents have the
fields that are known as members, the client raises errors with the same fields, and `error.data` has them as JSON.

```
{tree}
```

| error | is a | exit code | fields | meaning |
| --- | --- | --- | --- | --- |
{rows}
"""


def render() -> str:
    found: set[type[DormouseError]] = {
        each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, DormouseError)
    }
    ordered = sorted(found, key=lambda each: each.__name__)
    tree = [DormouseError.__name__, *_branches(DormouseError, ordered)]
    rows = "\n".join(map(_row, ordered))
    return _HEAD.format(made=made_of("dormouse/errors"), tree="\n".join(tree), rows=rows)


def _branches(error: type[DormouseError], among: Sequence[type[DormouseError]]) -> Iterator[str]:
    """Yields the lines of the tree below an error."""
    below = [each for each in among if each.__bases__[0] is error]
    for each in below:
        is_last = each is below[-1]
        yield f"{'└' if is_last else '├'}── {each.__name__}"
        yield from (f"{' ' if is_last else '│'}   {line}" for line in _branches(each, among))


def _row(error: type[DormouseError]) -> str:
    code = exit_code_of(error.__new__(error))
    doc = error.__dict__.get("__doc__") or ""
    fields = ", ".join(f"`{name}`" for name in error.fields())
    return f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {code} | {fields} | {cell(doc)} |"
