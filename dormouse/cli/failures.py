"""The printing of errors on stderr, exit codes, signals, and standard output that is full or closed."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from types import MappingProxyType
from typing import Any

from dormouse.errors import DormouseError, InvalidData, InvalidInput, missing

_COMMANDS = {*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0, 9, 10}
"""The characters to escape: control characters, and those that change the direction of text.

NUL, tab and line feed are not escaped.
"""
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in _COMMANDS}

FAILED, BAD_USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143


def printable(text: str) -> str:
    """Returns a text with control characters escaped, such as \\x1b."""
    return text.translate(_ESCAPED)


class ReaderGone(Exception):
    """An error that ends a command: the reader of its output has closed the pipe."""


class _Output(io.FileIO):
    """Standard output, for which a failed write raises an error that names standard output.

    Discards everything that is written after the failure.
    """

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
    """Replaces standard output by `_Output`, and closed standard streams by the null device.

    Otherwise the next opened file would get the descriptor of a closed stream.
    """
    is_original = sys.stdout is sys.__stdout__
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # writes to a closed stdout must fail; writes to a closed stderr may be lost
            nothing = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
            setattr(sys, name, os.fdopen(nothing, mode, encoding="utf-8", closefd=False))
    if is_original:
        out = sys.stdout
        guarded = io.BufferedWriter(_Output(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(guarded, out.encoding, line_buffering=out.isatty())


class Terminated(KeyboardInterrupt):
    """An error that SIGTERM raises. It ends a command like Ctrl-C, so that the command stops its servers."""


# The signals received. The error that ends the command may differ: DuckDB turns KeyboardInterrupt into
# a RuntimeError.
_came: list[KeyboardInterrupt] = []


_AGAIN_SECONDS = 0.1


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of an error: 2 if another command line would help, 1 for other failures.

    Signals have their own codes. The code is 0 if the reader of the output has closed the pipe.
    """
    if isinstance(error, KeyboardInterrupt):
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    if isinstance(error, ReaderGone):
        return 0
    usage = isinstance(error, InvalidInput) and not isinstance(error, InvalidData)
    return BAD_USAGE if usage else FAILED


def report(error: BaseException, *, debug: bool, as_json: bool = False) -> int:
    """Prints an error in one line, and returns the exit code. With `debug`, prints the traceback first.

    With `as_json`, prints JSON even if the command line of this process has no `--json`.
    """
    if isinstance(error, ReaderGone):
        return exit_code_of(error)
    if _came:
        error = _came[0]
        signal.setitimer(signal.ITIMER_REAL, 0)  # raised once more, it would be reported twice
    if debug:
        traceback.print_exception(error)
    code = exit_code_of(error)
    data = error.data if isinstance(error, DormouseError) else {}
    _fail(_message(error, debug=debug), type(error).__name__, code, as_json=as_json, data=data)
    return code


def complain(error: Any) -> int:
    """Prints the error about a command line that typer could not parse, and returns the exit code."""
    if not error.format_message().strip():
        return int(error.exit_code)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(error.format_message() + "\n")
        return BAD_USAGE
    context = getattr(error, "ctx", None)
    where = f" (see {context.command_path} --help)" if context is not None else ""
    code = int(error.exit_code)
    _fail(error.format_message().replace("Value error, ", "").rstrip(".") + where, "BadUsage", code)
    return code


@contextmanager
def interrupts_once() -> Iterator[None]:
    """Runs a block that only the first Ctrl-C or SIGTERM interrupts, so that the cleanup is not interrupted.

    An ignored SIGINT stays ignored, so that Ctrl-C does not end background jobs of the shell.

    A signal raises an exception, but libraries can lose it (extensions clear unexpected errors), and the
    command would continue. So the exception is raised again at intervals until it ends the block. It is not
    raised while Python handles an exception, because that is the cleanup.
    """
    raised: dict[int, type[KeyboardInterrupt]] = {signal.SIGTERM: Terminated}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        raised[signal.SIGINT] = KeyboardInterrupt
    ours = [*raised, signal.SIGALRM]
    before = {number: signal.getsignal(number) for number in ours}
    _came.clear()

    def interrupt(number: int, frame: object) -> None:
        for each in raised:
            signal.signal(each, signal.SIG_IGN)
        _came.append(raised[number]())
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise _came[0]

    def again(number: int, frame: object) -> None:
        if _came and sys.exc_info()[0] is None:
            raise _came[0].with_traceback(None)

    with suppress(ValueError):  # not the main thread
        for number in raised:
            signal.signal(number, interrupt)
        signal.signal(signal.SIGALRM, again)
    try:
        yield
    finally:
        if _came:
            signal.setitimer(signal.ITIMER_REAL, 0)
        # also after an error, as a program may call the command line in its own process
        for number, handler in before.items():
            if signal.getsignal(number) in (interrupt, again):
                signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C (unless ignored) or SIGTERM sets. A second signal ends the process."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def end(number: int, frame: object) -> None:
        stop.set()
        for each in before:
            signal.signal(each, before[each])

    for number in before:
        signal.signal(number, end)
    try:
        yield stop
    finally:
        for number in before:
            signal.signal(number, before[number])


def _message(error: BaseException, *, debug: bool) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "terminated" if isinstance(error, Terminated) else "interrupted"
    if isinstance(error, ModuleNotFoundError) and (advice := missing(error)) is not None:
        return str(advice)
    if isinstance(error, DormouseError):
        return str(error)
    hint = "" if debug else " (--debug shows where)"
    return f"unexpected {type(error).__name__}: {error}{hint}"


def _fail(
    message: str,
    kind: str,
    code: int,
    *,
    as_json: bool = False,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Prints a failure on stderr as one line, or with --json as a JSON document in one line."""
    if as_json or "--json" in sys.argv:
        said = {"error": kind, "message": " ".join(message.split()), "exit_code": code}
        document = {**data, **said}
        _write(json.dumps(document))
    else:
        say(message)


def say(message: str) -> None:
    """Prints one line on stderr."""
    _write(f"dormouse: {printable(' '.join(message.split()))}")


SAID_MAX = 100
"""The most lines that `say_some` prints. The output of --json has all objects."""


def say_some(messages: Iterable[str], end: str) -> None:
    """Prints the first `SAID_MAX` messages on stderr, and then `end`. Prints nothing without messages."""
    said = list(islice(messages, SAID_MAX))
    for message in [*said, *[end] * bool(said)]:
        say(message)


def _write(line: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
