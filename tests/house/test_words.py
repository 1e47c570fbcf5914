"""The words of docstrings, comments, messages and pages: plain English, by the rules of CONTRIBUTING.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parsed import forget
from tests.words import faults, texts

pytestmark = pytest.mark.usefixtures("trees_stay")

ROOT = Path(__file__).parents[2]
PLACES = (
    "dormouse", "stacks", "lambdas", "emr", "packages", "query_image", "benchmarks", "documentation",
    "examples", "pyspark_dormouse", "tests", "docs", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md",
    "CHANGELOG.md", "app.py", "setup.py", "dormouse_command.py",
)  # fmt: skip
FIXED = (
    "dormouse/postgres/migrations/",
    "dormouse/rows/index_migrations/",
    "tests/words.py",
    "tests/house/test_words.py",
)
"""Files that are not checked: released migrations, which never change, and the lists of banned words."""


@pytest.fixture(scope="module", autouse=True)
def _trees_are_forgotten() -> Iterator[None]:
    """Frees the syntax trees after the last module that reads those of all files."""
    yield
    forget()


@pytest.mark.parametrize("place", PLACES)
def test_words_are_plain(place: str) -> None:
    wrong = []
    for path in texts([ROOT / place]):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(FIXED):
            wrong += [str(fault) for fault in faults(path)]
    assert wrong == []


def test_a_riddle_is_found(tmp_path: Path) -> None:
    path = tmp_path / "riddles.py"
    path.write_text(
        '"""What is kept for whoever asks."""\n\n\n'
        'def told(found):\n    """Whether it is so."""\n    # for ever\n'
    )
    rules = {fault.rule for fault in faults(path)}
    assert rules == {"opening", "name", "for ever", "whoever"}
    path = tmp_path / "divided.py"
    path.write_text('wait(\n    "for "\n    "ever and a day"\n)\n')
    assert [fault.rule for fault in faults(path)] == ["for ever"]
