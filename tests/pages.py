"""A runner for the code blocks of a documentation page, in their order.

All Python runs in one namespace, all shell in one environment, and both in one folder. Names of places that
tests do not have, such as buckets, are replaced by names of places that tests have.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from unittest import SkipTest

import yaml
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from dormouse.cli import main
from tests.support.api import Instance

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^\s*```(\w+)$", re.MULTILINE)
READ = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load, "ini": ConfigParser().read_string}
DRAWN = {"mermaid"}
"""The languages of diagrams. They are not run; a test compares them. `READ` blocks are only parsed."""

_QUOTED = re.compile(r"""'[^']*'|"[^"$`]*\"""")
_GOES_ON = re.compile(r"dormouse (serve|maintain|committer|jobs worker)\b(?!.*--(once|drain|help))")
_BELONGS_TOGETHER = re.compile(r"<<|&$|^(for|while|if)\b|^ *[^#'\n]*'[^'\n]*$", re.MULTILINE)
_OF_BASH = {"PWD", "OLDPWD", "SHLVL", "_", "ENVIRONMENT_AFTER"}
SECONDS_MAX = 300


class Page:
    """A page, and the state of its blocks: folder, variables, names and background programs."""

    def __init__(
        self, path: Path, folder: Path, variables: Mapping[str, str], places: Mapping[str, str]
    ) -> None:
        self.path = path
        self._folder, self._places = folder, places
        self._variables = {**os.environ, **variables}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._groups: list[int] = []
        self.not_run: Counter[str] = Counter()

    def run(self, names: dict[str, Any]) -> None:
        """Runs all blocks. A failing block raises an error with its line."""
        document = _sybil(
            {"python": self._python, "sh": self._shell, "sql": self._sql, **dict.fromkeys(READ, self._read)}
        ).parse(self.path)
        document.namespace.update(names)
        try:
            for example in document.examples():
                try:
                    example.evaluate()
                except SkipTest as reason:
                    self.not_run[str(reason)] += 1
        finally:
            self._end_what_goes_on()
            for left in document.namespace.values():
                if isinstance(left, Instance):
                    left.close()  # a page may leave it open, and so its PostgreSQL

    def _python(self, example: Example) -> None:
        source = "\n" * (example.line + example.parsed.line_offset) + self._placed(example)
        with _variables(self._variables), _in_time():
            exec(compile(source, str(self.path), "exec"), example.namespace)  # noqa: S102

    def _shell(self, example: Example) -> None:
        text = self._placed(example)
        commands = commands_of(text)
        if commands and all(command.startswith("pip install") for command in commands):
            return  # test_extras installs each extra into its own environment
        try:
            for command in commands:
                self._dormouse(command) if _is_plain(command) else self._bash(command)
        except AssertionError as error:
            raise AssertionError(f"{self.path.relative_to(ROOT)}:{example.line}: {error}") from None

    def _dormouse(self, command: str) -> None:
        """Runs a command in this process, which has already imported everything; answers each question with
        yes.
        """
        for kind in [kind for kind in self._running if command.startswith(f"dormouse {kind}")]:
            self._end(kind)  # a page shows several ways to start the same program
        if _GOES_ON.match(command):
            return self._begin(command)
        out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        said, before = _Person(), (sys.argv, sys.stdin)
        sys.argv, sys.stdin = shlex.split(command, comments=True), _Person("y\n")
        try:
            with (
                _variables(self._variables),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(said),
            ):
                code = main()
        finally:
            sys.argv, sys.stdin = before
        assert code == 0, f"{command.strip()}\n{said.getvalue()}"
        return None

    def _bash(self, text: str) -> None:
        with tempfile.NamedTemporaryFile() as after, tempfile.TemporaryFile("w+") as said:
            bash = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", f'{text}\nenv -0 > "$ENVIRONMENT_AFTER"'],
                env={**self._variables, "ENVIRONMENT_AFTER": after.name},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=said,  # background programs would keep a pipe open
                stderr=said,
                start_new_session=True,
            )
            self._groups.append(bash.pid)
            try:
                code = bash.wait(SECONDS_MAX)
            except subprocess.TimeoutExpired:
                code = None
            said.seek(0)
            assert code == 0, f"{text}\nended with {code}: {said.read()}"
            pairs = (pair.split("=", 1) for pair in Path(after.name).read_text().split("\0") if pair)
            self._variables = {name: value for name, value in pairs if name not in _OF_BASH}

    def _begin(self, command: str) -> None:
        """Starts a program that runs until the page ends, or until another program takes its port."""
        arguments = shlex.split(command, comments=True)
        port = next((each for flag, each in itertools.pairwise(arguments) if flag == "--port"), "")
        kind = f"{arguments[1]} {port}".strip()
        self._end(kind)
        variables = {**self._variables, "DORMOUSE_SERVICE_SHUTDOWN_SECONDS_MAX": "0"}
        process = subprocess.Popen(
            arguments, env=variables, cwd=self._folder, text=True, stderr=subprocess.PIPE
        )
        self._running[kind] = process
        deadline = time.monotonic() + SECONDS_MAX
        listens_at = int(port or variables["DORMOUSE_SERVICE_PORT"]) if arguments[1] == "serve" else None
        while listens_at is not None and not _listens(listens_at):
            assert process.poll() is None, f"{command}\n{process.communicate()[1]}"
            assert time.monotonic() < deadline, f"{command}: it does not answer"
            time.sleep(0.05)

    def _end_what_goes_on(self) -> None:
        for kind in list(self._running):
            self._end(kind)
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

    def _end(self, kind: str) -> None:
        if process := self._running.pop(kind, None):
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=SECONDS_MAX)[1]
            assert process.returncode in {0, -signal.SIGTERM, 143}, f"{kind}: {said}"

    def _sql(self, example: Example) -> None:
        example.namespace["psql"](example.parsed)

    def _read(self, example: Example) -> None:
        language = example.document.text[example.start :].lstrip("` ").split("\n", 1)[0]
        lines = [example.parsed]
        if language == "json" and "}\n{" in example.parsed:
            lines = example.parsed.splitlines()
        for text in lines:
            READ[language](text)
        example.namespace["last_read"] = example.parsed

    def _placed(self, example: Example) -> str:
        text = str(example.parsed)
        places = {**self._places, "JOB_ID": str(example.namespace.get("job_id", "JOB_ID"))}
        for place, ours in places.items():
            text = text.replace(place, ours)
        return text


class _Person(io.StringIO):
    """A stream that claims to be a terminal, like a person's."""

    def isatty(self) -> bool:
        return True


def _sybil(evaluators: Mapping[str, Callable[[Example], None]]) -> Sybil:
    parsers = [CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()]
    return Sybil([*parsers, SkipParser()])


def blocks(path: Path) -> Counter[str]:
    """Returns the number of blocks of each language on a page."""
    return Counter(FENCE.findall(path.read_text("utf-8")))


def first_block(path: Path, language: str) -> str:
    """Returns the first code block of a page in a language."""
    return re.search(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)[1]  # type: ignore[index]


def parsed_blocks(path: Path) -> int:
    """Returns the number of blocks on a page that are run or parsed."""
    found = _sybil(dict.fromkeys(["python", "sh", "sql", *READ], lambda example: None)).parse(path)
    return sum(not isinstance(example.parsed, tuple) for example in found.examples())


def commands_of(text: str) -> list[str]:
    """Returns the commands of a block, each on one line; or the whole block, if it cannot be divided."""
    if _BELONGS_TOGETHER.search(text):
        return [text]
    return [line for line in text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]


def _is_plain(command: str) -> bool:
    """Returns whether a line is a single `dormouse` command without shell syntax."""
    rest = _QUOTED.sub("", command).split(" #")[0]
    return rest.startswith("dormouse ") and not re.search(r"""[|&;<>$`*(){}~"']""", rest)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Raises TimeoutError if the block does not end in time."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(f"it runs for longer than {SECONDS_MAX} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])
