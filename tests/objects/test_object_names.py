import pytest

from dormouse.errors import InvalidInput, InvalidName
from dormouse.objects.names import check_file_name, check_name, check_prefix
from tests.support.objects import open_store

OWN = (f"data/{'7' * 32}/", "data/t7/")


@pytest.mark.parametrize(
    "name", ["a", "data/t1/ab12/0-root.parquet", "a.b_c=d-e", "..a", "x/.hidden", "A" * 255]
)
def test_plain_relative_names_are_valid(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", ".", "a/./b", "a//b", "a/", "//",
        "a\0b", "a\\b", "..\\x", "C:\\x", "a b", "a%2e%2e", "a\n", "é", "a?b", "a*", "s3://b/x", "\udc80",
        "A" * 256, "a/" * 500 + "a", ".staging", ".staging/x", None, 7, b"a",
    ],
)  # fmt: skip
def test_names_that_could_leave_the_store_or_need_encoding_are_invalid(name: str) -> None:
    with pytest.raises(InvalidName, match="Object name"):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    [f"{OWN[0]}1/a/b.parquet", "data/t7/a/b.parquet", "a", "é b", "x/y..z", "datas/t8/a", "data/x/a", "a:b"],
)
def test_files_may_have_the_names_that_callers_choose(name: str) -> None:
    assert check_file_name(name, OWN) == name


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd", "/etc/passwd", "a/../b", "a/.", "a//b", "a/", "s3://b/x", "file:///x",
        "instance.json", "owner/1.json", "commits/a-b.json", "payloads/x", "backups/x", "runs/x",
        ".staging/x", "work/x", "activity/x", "data/t8/x", "data/t70/x", "data/t7",
        f"data/{'ab' * 16}/x", f"data/{'7' * 32}",
    ],
)  # fmt: skip
def test_file_names_of_other_tables_are_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="File name"):
        check_file_name(name, OWN)


def test_a_prefix_is_a_name_or_empty_and_may_end_with_a_slash() -> None:
    assert [check_prefix(prefix) for prefix in ("", "a/b", "a/b/")] == ["", "a/b", "a/b"]
    with pytest.raises(InvalidName):
        check_prefix("../a")


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket/x", "s3://", "s3:///x", "s3://B", "s3://ab/../x", "s3://abc//x", "s3://abc/x?y=1", "s3a://abc/x",
        "http://host/x", "file://host/path", "file://relative", "file:///", "file:///x?y", "", "  ", "a\0b",
    ],
)  # fmt: skip
def test_a_bad_url_is_reported_in_one_line_that_names_it(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store(url)
    assert repr(url) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_credentials_do_not_show_when_a_store_is_printed() -> None:
    assert "hidden" not in repr(open_store("s3://bucket/x", secret_access_key="hidden"))  # noqa: S106
