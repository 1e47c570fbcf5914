"""The code that one call runs: files, functions, rooms and stack depth of Dormouse in a warm call.

Each behaviour runs a few times, so that the next call neither imports nor connects. `sys.setprofile` records
that call in this thread and the threads that it starts. Only code of `dormouse/` counts. A room is a folder
of `dormouse/`, or a subfolder that the architecture draws as a room. The numbers of files and lines and the
longest chain of imports come from the sources.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, values
from dormouse.api.instance import Instance

PACKAGE = Path(dm.__file__).parent
SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.STRING, nullable=True)])
INNER = {"reading/sql", "state/files", "state/commits", "state/history", "aws/schedules"}
"""The subfolders of rooms that are rooms themselves."""
BEHAVIOURS = {
    "ingest": "table.ingest of 3 rows",
    "query_key": "table.query by key",
    "query_sql": "table.sql by key",
    "rows_patch": "rows.change of one Patch",
    "offload": "payloads.offload of one day",
    "jobs_start": "jobs.start",
}
COUNTS = {"files": "files", "functions": "functions", "rooms": "rooms", "depth": "stack depth"}


@dataclass(frozen=True)
class Plan:
    warm: int = amount(5, 2, help="calls before the recorded one [5]")


@dataclass
class Reached:
    """The functions that ran in a call, and the depth of the stack."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)
    depth: int = 0

    def counts(self) -> dict[str, int]:
        files = {name for name, _, _ in self.functions}
        return {
            "files": len(files),
            "functions": len(self.functions),
            "rooms": len({room_of(Path(name).relative_to(PACKAGE)) for name in files}),
            "depth": self.depth,
        }


def room_of(path: Path) -> str:
    """Returns the room of a module, whose path is relative to the package's folder."""
    parts = path.parts[:-1]
    inner = "/".join(parts[:2])
    return inner if inner in INNER else parts[0] if parts else path.stem


@contextmanager
def followed() -> Iterator[Reached]:
    """Records the functions of Dormouse that run in this thread and in threads that it starts."""
    found, depths = Reached(), defaultdict[int, int](int)
    ours: dict[Any, bool] = {}
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (is_ours := ours.get(code)) is None:
            is_ours = ours[code] = code.co_filename.startswith(prefix) and code.co_name != "<module>"
        if not is_ours:
            return
        thread = threading.get_ident()
        if event == "call":
            depths[thread] += 1
            found.depth = max(found.depth, depths[thread])
            found.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
        elif event == "return":
            depths[thread] -= 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def measure(plan: Plan, tell: Tell) -> Figures:
    """Records a warm call of each behaviour, and reads the sources."""
    found: Figures = {}
    with own_place() as place, dm.connect(place.dsn, place.objects) as instance:
        for name, call in calls(instance).items():
            tell(name)
            for _ in range(plan.warm):
                call()
            with followed() as path:
                call()
            found |= {f"{count}_{name}": number for count, number in path.counts().items()}
    tell("sources")
    return found | sources()


def calls(instance: Instance) -> Mapping[str, Callable[[], object]]:
    """Returns a call for each behaviour."""
    table = instance.create_table("paths", SCHEMA)
    data = pa.table({"k": [1, 2, 3], "v": ["a", "b", None]})
    table.ingest(data)
    edited = instance.create_row_table("edited", [dm.Column("n", "INTEGER")])
    edited.change([dm.Insert([{"n": 1}])])
    version, day = 1, datetime.now(UTC) - timedelta(days=30)

    def patch() -> None:
        nonlocal version
        edited.change([dm.Patch([{"ROW_ID": 1, "ROW_VERSION": version, "n": version + 1}])])
        version += 1

    def offload() -> None:
        nonlocal day
        day += timedelta(days=1)
        instance.payloads.put("tenant", "id", day, "input", {"n": 1})
        instance.payloads.offload(day.date())

    return {
        "ingest": lambda: table.ingest(data),
        "query_key": lambda: table.query({"k": 1}).read_all(),
        "query_sql": lambda: table.sql("select * from paths where k = 1").read_all(),
        "rows_patch": patch,
        "offload": offload,
        "jobs_start": lambda: instance.jobs.start("compact", {"table": "paths"}),
    }


def sources() -> dict[str, int]:
    """Returns how many files and lines there are, and the length of the longest chain of imports."""
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(imported(path, paths)) - {name} for name, path in paths.items()}

    @cache
    def chain(name: str) -> int:
        return 1 + max(map(chain, graph[name]), default=0)

    rooms = {name: room_of(path.relative_to(PACKAGE)) for name, path in paths.items()}
    arrows = {(rooms[name], rooms[other]) for name, known in graph.items() for other in known}
    return {
        "files": len(paths),
        "lines": sum(len(path.read_text("utf-8").splitlines()) for path in paths.values()),
        "longest_import_chain": max(map(chain, graph)),
        "rooms": len(set(rooms.values())),
        "arrows": sum(a != b for a, b in arrows),
    }


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yields the modules of Dormouse that a module imports, at its top or within functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            for module in (name, name.rpartition(".")[0]):
                if module in known:
                    yield module
                    break


BENCHMARK = Benchmark(
    name="paths",
    question=__doc__,
    plan=Plan,
    measure=measure,
    figures=[
        Grid(BEHAVIOURS, {f"{count}_{{}}": head for count, head in COUNTS.items()}),
        values(
            {
                "files": "files in dormouse/",
                "lines": "lines of Python",
                "longest_import_chain": "modules in the longest chain of imports",
                "rooms": "rooms",
                "arrows": "pairs of rooms of which one imports the other",
            }
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
