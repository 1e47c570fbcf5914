"""Every error: what it means, and what the command line and the query service make of it."""

from __future__ import annotations

import inspect

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
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].split("\n\n")[0].rstrip()
    found = [
        each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, DormouseError)
    ]
    rows = [_row(each) for each in sorted(found, key=lambda each: each.__name__)]
    return _HEAD.format(made=made_of("dormouse/errors"), tree=tree, rows="\n".join(rows))


def _row(error: type[DormouseError]) -> str:
    code = exit_code_of(error.__new__(error))
    doc = error.__dict__.get("__doc__") or ""
    fields = ", ".join(f"`{name}`" for name in error.fields())
    return f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {code} | {fields} | {cell(doc)} |"
