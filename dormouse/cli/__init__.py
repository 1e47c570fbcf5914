"""The command line: one command for each method of the Python classes.

Commands print text for people, or with `--json` one JSON document; failures are printed on stderr. Exit
codes: 0 done, 1 failed, 2 bad usage, 130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import io
import logging
import sys

from dormouse import __version__
from dormouse.cli.failures import ReaderGone, guard_streams, interrupts_once, report
from dormouse.errors import DormouseError


def main() -> int:
    """Runs the command of `sys.argv`; returns its exit code."""
    guard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack characters such as ✓
    if "--debug" not in sys.argv:
        logging.getLogger().addHandler(
            logging.NullHandler()
        )  # errors are one line, without earlier log lines
    with interrupts_once():
        try:
            return _run(sys.argv[1:])
        except (KeyboardInterrupt, ReaderGone, DormouseError) as error:
            return report(error, debug="--debug" in sys.argv)


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        # the version needs none of the modules of the commands
        sys.stdout.write(f"dormouse {__version__}\n")
        sys.stdout.flush()
        return 0
    from dormouse.cli.program import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
