"""The program `dormouse`: also while it loads, Ctrl-C and SIGTERM end it in one line.

Started with SIGINT ignored, as `nohup` and shells start what runs in the background, it goes on ignoring it.
"""

from __future__ import annotations

import os
import signal

_ENDINGS = {
    signal.SIGINT: (b"dormouse: interrupted\n", 130),
    signal.SIGTERM: (b"dormouse: terminated\n", 143),
}


def main() -> int:
    """Runs the command of `sys.argv`; gives its exit code."""
    for number in _ENDINGS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)  # until the command line sets its own: nothing is begun before
    from dormouse.cli import main as run

    return run()


def _end(number: int, frame: object) -> None:
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    line, code = _ENDINGS[signal.Signals(number)]
    os.write(2, line)
    os._exit(code)
