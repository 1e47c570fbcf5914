"""The page on the SQL of row tables: its answers are real, and it covers everything that the parser
accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlglot import exp

import dormouse as dm
from documentation import row_sql
from documentation.row_sql import COLUMNS, REFUSED, ROWS, Example, examples, render
from dormouse.errors import InvalidQuery
from dormouse.rows import binding, types
from dormouse.rows.statements import statement_of
from tests.support.rows import RowTable


@pytest.fixture(scope="module")
def staff(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RowTable]:
    objects = tmp_path_factory.mktemp("staff").as_uri()
    with dm.connect(new_database(template_database), objects) as instance:
        rows = instance.create_row_table("staff", COLUMNS)
        rows.change([dm.Insert(ROWS)])
        rows.snapshot("first")
        rows.change([dm.Insert([{"name": "late"}])])
        rows.change([dm.Remove([(4, 2)])])
        yield rows


@pytest.mark.parametrize("example", examples(), ids=lambda one: one.query)
def test_each_example_has_the_shown_answer(staff: RowTable, example: Example) -> None:
    """The index gives the answer, and so do the files, from which older versions are read."""
    for page in (staff.query(example.query), staff.query(example.query, snapshot="first")):
        assert repr(page.rows) == repr(example.answer)


@pytest.mark.parametrize(("query", "named"), REFUSED.values(), ids=REFUSED)
def test_errors_name_the_unsupported_part_and_an_alternative(staff: RowTable, query: str, named: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        staff.query(query)
    assert f"the query has {named}" in str(refused.value)
    assert "\n" not in str(refused.value)
    if named != "a comment":
        assert "instance.sql(" in str(refused.value)


def test_the_page_covers_everything_that_the_parser_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    page = render()
    for one in examples():
        assert one.written in page
    for tables, name, new in (
        (types.AGGREGATES, exp.Median, "median"),
        (binding.EXPRESSIONS, exp.ILike, None),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(tables, name, new)  # type: ignore[arg-type]
            with pytest.raises((KeyError, ValueError)):
                render()
    with monkeypatch.context() as patched:
        patched.setattr(row_sql, "CLAUSES", (*binding.CLAUSES, "qualify"))
        with pytest.raises(ValueError, match="qualify"):
            render()


def test_each_example_has_the_construct_of_its_title() -> None:
    """An example without the construct that it is meant to show must be removed."""
    assert set(row_sql.OF_CLAUSES) == set(binding.CLAUSES)
    assert set(row_sql.OF_OPERATORS) == binding.EXPRESSIONS.keys() - types.AGGREGATES.keys()
    assert set(row_sql.OF_FUNCTIONS) == set(types.AGGREGATES.values())
    columns = [dm.Column(one.name, one.type, column_id=n) for n, one in enumerate(COLUMNS, 4)]
    for name, one in row_sql.OF_FUNCTIONS.items():
        assert f"{name}(" in one.query
        assert statement_of(one.query, "staff", columns).is_grouped
