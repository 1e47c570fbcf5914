"""Files read in a process of their own, which a damaged one may end: Arrow's C++ trusts a file's footer.

A file whose digest is the one that was recorded is what was written, and needs none.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import BinaryIO

from dormouse.data.file_checks import Found, Written, file_problems
from dormouse.errors import DormouseError, EngineFailed, one_line
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore

_OF_DAMAGE = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class FileReader:
    """Asks one process, which is started when it is needed. Close it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def problems(self, store: ObjectStore, name: str, schema: Schema, written: Written) -> list[Found]:
        """As `file_problems`; also of a file that ends the process. Raises `EngineFailed` when others do."""
        process = self._process = self._process or _started()
        assert process.stdin is not None  # noqa: S101 both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            pickle.dump((store, name, schema, written), process.stdin)
            process.stdin.flush()
            answer: list[Found] | DormouseError = pickle.load(process.stdout)  # noqa: S301 of our own process
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            return [("object_unreadable", _why_it_ended(self.close()))]
        if isinstance(answer, DormouseError):
            raise answer
        return answer

    def close(self) -> int:
        """Ends the process; gives how it ended."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with process:  # closes its pipes: it ends when there is nothing more to read
            pass
        return process.returncode


def _why_it_ended(code: int) -> str:
    if -code in _OF_DAMAGE:
        return f"to read it ends the process that does ({signal.Signals(-code).name}): it is damaged"
    raise EngineFailed(f"the process that reads files ended ({code}): out of memory, or somebody ended it")


def _started() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    # as a group of its own, it hears no Ctrl-C: it ends when its pipe is closed
    return subprocess.Popen(
        [sys.executable, "-m", "dormouse.data.file_reader"], stdin=pipe, stdout=pipe, process_group=0
    )


def _serve(asked: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            store, name, schema, written = pickle.load(asked)  # noqa: S301 of the process that started us
        except EOFError:
            return
        answer: list[Found] | DormouseError
        try:
            answer = file_problems(store, name, schema, written)
        except DormouseError as error:
            answer = error
        except Exception as error:  # whatever damage makes of values
            answer = [("object_unreadable", f"{type(error).__name__}: {one_line(error)}")]
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        _serve(sys.stdin.buffer, answers)
