"""Standard output that may be full, closed, or without a reader."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from dormouse.errors import DormouseError

_COMMANDS = {*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0, 9, 10}
"""Control characters but for NUL, tab and line feed; and those that turn the direction of writing."""
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in _COMMANDS}


def printable(text: str) -> str:
    """The text with what a terminal would obey escaped, like \\x1b."""
    return text.translate(_ESCAPED)


class ReaderGone(Exception):
    """The reader of our output has what it wanted."""


class _Output(io.FileIO):
    """Fails once, by an error that names it; what comes after goes nowhere, as at Python's exit."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from None
            raise DormouseError(f"cannot write to standard output: {error.strerror}") from None


def guard_streams() -> None:
    """Has failures of standard output name it, and no file of ours take the number of a closed stream."""
    is_original = sys.stdout is sys.__stdout__
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # answers must not be lost without a word; errors may be, where they are not wanted
            nothing = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
            setattr(sys, name, os.fdopen(nothing, mode, encoding="utf-8", closefd=False))
    if is_original:
        out = sys.stdout
        guarded = io.BufferedWriter(_Output(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(guarded, out.encoding, line_buffering=out.isatty())
