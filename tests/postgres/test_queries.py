from __future__ import annotations

from pathlib import Path

import pytest

from dormouse.postgres.queries import load, parse

TEXT = """\
-- Everything about files.

-- name: add_files
-- Adds files that are
-- not tracked yet.
insert into {file} select unnest(%(names)s::text[]);

-- name: list_files
-- Lists them.
select name from {file} join {reference} using (name);
"""


def rendered(text: str, **identifiers: str | tuple[str, ...]) -> str:
    return parse(f"-- name: q\n-- Says.\n{text}", source="x.sql")["q"].on(**identifiers).as_string(None)


def test_a_file_holds_named_and_described_queries() -> None:
    queries = parse(TEXT, source="files.sql")
    assert list(queries) == ["add_files", "list_files"]
    assert queries["add_files"].description == "Adds files that are not tracked yet."
    assert queries["add_files"].text == "insert into {file} select unnest(%(names)s::text[]);"


def test_identifiers_are_quoted_and_may_be_qualified() -> None:
    text = rendered("select * from {file}, {other}", file=("dormouse", "file_17"), other='a"; drop table b')
    assert text == 'select * from "dormouse"."file_17", "a""; drop table b"'


def test_other_braces_are_kept() -> None:
    assert (
        rendered("select '{}'::int[], '{1,2}', '{\"a\": 1}'") == "select '{}'::int[], '{1,2}', '{\"a\": 1}'"
    )


@pytest.mark.parametrize(
    ("written", "executed"),
    [
        ("select 7 % 2", "select 7 % 2"),
        ("select 7 %% 2", "select 7 % 2"),
        ("select %(x)s % 2 where n like '%a'", "select %(x)s %% 2 where n like '%%a'"),
        ("select %(x)s %% 2", "select %(x)s %% 2"),
        ("select %(x)b, %(y)t", "select %(x)b, %(y)t"),
    ],
)
def test_a_percent_sign_stays_single_with_and_without_values(written: str, executed: str) -> None:
    assert rendered(written) == executed


def test_a_percent_sign_in_an_identifier_is_kept() -> None:
    assert rendered("select %(x)s from {file}", file="50%") == 'select %(x)s from "50%%"'


@pytest.mark.parametrize("identifiers", [{}, {"file": "f", "other": "o"}, {"other": "o"}])
def test_exactly_the_query_s_identifiers_must_be_given(identifiers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'q' takes the identifiers file"):
        rendered("select * from {file}", **identifiers)


def test_the_same_identifiers_are_composed_once() -> None:
    query = parse(TEXT, source="files.sql")["add_files"]
    assert query.on(file="a") is query.on(file="a")
    assert query.on(file="a") is not query.on(file="b")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-- name: a\n-- A.\nselect 1;\n-- name: a\n-- B.\nselect 2;", "'a' is there twice"),
        ("-- name: a\nselect 1;", "'a' has no description"),
        ("-- name: a\n--\nselect 1;", "'a' has no description"),
        ("-- name: a\n-- A.\n", "'a' has no SQL"),
        ("-- name:\n-- A.\nselect 1", "'' is not a name"),
        ("-- name: a-b\n-- A.\nselect 1", "'a-b' is not a name"),
        ("select 1", "no query"),
    ],
)
def test_a_mistake_in_a_file_is_reported_when_it_is_loaded(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"x\.sql: .*{reason}"):
        parse(text, source="x.sql")


def test_an_unknown_query_is_reported_with_the_known_names() -> None:
    with pytest.raises(KeyError, match=r"files\.sql has no query named 'nope'; it has add_files, list_files"):
        parse(TEXT, source="files.sql")["nope"]


def test_queries_are_loaded_from_beside_a_module_or_from_a_package(tmp_path: Path) -> None:
    (tmp_path / "files.sql").write_text(TEXT)
    assert list(load(str(tmp_path / "store.py"), "files")) == ["add_files", "list_files"]
    assert "applied" in load("dormouse.postgres", "migrate")
