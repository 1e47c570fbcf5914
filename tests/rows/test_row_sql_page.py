"""The page of the SQL of row tables says what a row table answers, and lacks nothing that its parser has."""

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
def test_an_example_has_the_answer_that_is_shown(staff: RowTable, example: Example) -> None:
    """Of the index, and of the files, in which older versions are looked up."""
    for page in (staff.query(example.query), staff.query(example.query, snapshot="first")):
        assert repr(page.rows) == repr(example.answer)


@pytest.mark.parametrize(("query", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_named_with_what_understands_it(
    staff: RowTable, query: str, named: str
) -> None:
    with pytest.raises(InvalidQuery) as refused:
        staff.query(query)
    assert f"the query has {named}" in str(refused.value)
    assert "\n" not in str(refused.value)
    if named != "a comment":
        assert "instance.sql(" in str(refused.value)


def test_the_page_lacks_nothing_that_the_parser_takes(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_each_example_shows_what_it_is_of() -> None:
    """No example is left of what the parser takes no more."""
    assert set(row_sql.OF_CLAUSES) == set(binding.CLAUSES)
    assert set(row_sql.OF_OPERATORS) == binding.EXPRESSIONS.keys() - types.AGGREGATES.keys()
    assert set(row_sql.OF_FUNCTIONS) == set(types.AGGREGATES.values())
    columns = [dm.Column(one.name, one.type, column_id=n) for n, one in enumerate(COLUMNS, 4)]
    for name, one in row_sql.OF_FUNCTIONS.items():
        assert f"{name}(" in one.query
        assert statement_of(one.query, "staff", columns).is_grouped
