"""Extras that are complete: with one extra, the wheel runs the first code block of that extra's guide."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT, first_block

pytestmark = pytest.mark.slow

GUIDES = {
    "local": ("docs/quickstart.md", "sh"),
    "sql": ("docs/how-to/sql.md", "python"),
    "spark": ("docs/how-to/spark.md", "python"),
    "cdk": ("docs/how-to/own-cdk-app.md", "python"),
}
"""The extras whose guides need no server: for each its guide, and the language of its code."""
CODE = {
    "cli": "import dormouse.cli",
    "query": "import dormouse.reading.where, datafusion, pyarrow",
    "rows": "import dormouse.rows",
    "aws": "from dormouse.aws.aws import open_session; open_session('eu-west-1')",
    "service": "from dormouse.service.app import Server",
    "client": "import dormouse.client.rows; dormouse.client.connect('http://127.0.0.1:1').close()",
    "pandas": "import pandas, pyarrow; pyarrow.table({'a': [1]}).to_pandas()",
    "polars": "import polars, pyarrow; polars.from_arrow(pyarrow.table({'a': [1]}))",
}
WITHOUT = {
    "dormouse --help": "dormouse: typer is not installed: pip install 'dormouse-lake[cli]'",
    "python -c 'import dormouse.client'": "httpx is not installed: pip install 'dormouse-lake[client]'",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from all files that git does not ignore; returns its path."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(made), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    [wheel] = made.glob("*.whl")
    return wheel


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a temporary folder that PostgreSQL's user can reach when root runs the tests."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        yield Path(made)


def environment(folder: Path, wheel: Path, extra: str) -> dict[str, str]:
    """Makes a virtual environment with the wheel and an extra; returns the environment variables to
    use it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    what = f"dormouse-lake[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
    subprocess.run([*uv, what], check=True)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}


@pytest.mark.parametrize("extra", [*GUIDES, *CODE])
def test_an_extra_has_what_its_guide_needs(extra: str, wheel: Path, folder: Path, tmp_path: Path) -> None:
    variables = environment(folder / "environment", wheel, extra)
    if extra in GUIDES:
        page, language = GUIDES[extra]
        text = first_block(ROOT / page, language)
    else:
        language, text = "python", CODE[extra]
    if extra in {"sql", "spark"}:  # their guides read tables that another guide made
        text = f"import dormouse\nimport {'duckdb' if extra == 'sql' else 'pyspark, dormouse.spark.session'}"
    program = {"python": ["python", "-c"], "sh": ["bash", "-e", "-c"]}[language]
    done = subprocess.run(
        [*program, text], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_extras_one_line_says_what_to_install(wheel: Path, tmp_path: Path) -> None:
    variables = environment(tmp_path / "environment", wheel, "")
    for command, line in WITHOUT.items():
        done = subprocess.run(
            ["bash", "-c", command], env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].endswith(line)
