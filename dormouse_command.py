"""The program `dormouse`: also while it loads, Ctrl-C and SIGTERM end it in one line.

Started with SIGINT ignored, as `nohup` and shells start what runs in the background, it goes on ignoring it.
"""

from __future__ import annotations

import os
import signal
import sys

_ENDINGS = {
    signal.SIGINT: (b"dormouse: interrupted\n", 130),
    signal.SIGTERM: (b"dormouse: terminated\n", 143),
}


def main() -> int:
    """Runs the command of `sys.argv`; gives its exit code."""
    for number in _ENDINGS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)  # until the command line sets its own: nothing is begun before
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
    """Keeps libraries from loading plugins and packages that this program does not need."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # in the metadata of every package
    if sys.argv[1:2] == ["query"]:
        # Arrow loads it to know its kinds of null, with the first value that it converts
        sys.meta_path.insert(0, _WithoutPandas())


class _WithoutPandas:
    """An import hook that hides pandas, as if it were not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out here", name=fullname)


def _end(number: int, frame: object) -> None:
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    line, code = _ENDINGS[signal.Signals(number)]
    os.write(2, line)
    os._exit(code)
