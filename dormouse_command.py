"""The program `dormouse`. Even while it loads, Ctrl-C and SIGTERM end it with one line.

If it was started with SIGINT ignored, as `nohup` and shells do for background programs, it goes on ignoring
it.
"""

from __future__ import annotations

import os
import signal
import sys

_ENDINGS = {
    signal.SIGINT: (b"dormouse: interrupted\n", 130),
    signal.SIGTERM: (b"dormouse: terminated\n", 143),
}
_WITHOUT_PANDAS = {
    "changes", "delete", "merge-into", "query", "replace", "rows", "serve", "sql", "update",
}  # fmt: skip
"""Commands that convert values and never use Spark, which may want pandas."""


def main() -> int:
    """Runs the command of `sys.argv`; returns its exit code."""
    for number in _ENDINGS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)  # until the command line sets its own
    _spare_imports()
    try:
        from dormouse.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich"}:
            raise
        from dormouse.errors import not_installed

        sys.stderr.write(f"dormouse: {not_installed(str(error.name), 'cli')}\n")
        return 1


def _spare_imports() -> None:
    """Prevents imports of libraries that this program does not need."""
    # pydantic would look for plugins in the metadata of every package
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if _WITHOUT_PANDAS.intersection(sys.argv[1:2]):
        from dormouse.settings.process import leave_out_pandas

        leave_out_pandas()


def _end(number: int, frame: object) -> None:
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    line, code = _ENDINGS[signal.Signals(number)]
    os.write(2, line)
    os._exit(code)
