"""The page about errors: their meanings, fields and exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from documentation import cell, made_of
from dormouse import errors
from dormouse.cli.failures import exit_code_of
from dormouse.errors import DormouseError

_HEAD = """# Errors

{made}

All errors are classes in `dormouse.errors`. An error message is one line that names the affected object and a remedy. For errors that
mean trouble in operation, the [runbook](../how-to/runbook.md) has more.

Each door reports an error in its own way:

- The command line ends with the exit code of the error. With `--json`, it also prints the name of the error.
- An HTTP response is a problem document. Its type is `urn:dormouse:` and the name in lower case, like
  `urn:dormouse:table-not-found`. Its members include the fields that are known.
- The HTTP client raises the same error with the same fields.

A program can read the details in the fields of the error. A field is None if its value is not known. `error.data` has the fields as
JSON.

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
    """Yields the lines of the tree below an error, which has only errors of `among`."""
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
