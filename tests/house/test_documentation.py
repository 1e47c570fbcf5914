"""Generated pages, which match the code, and links between pages, which lead to existing files and
headings.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from documentation import ROOT, pages

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", pages())
def test_a_generated_page_matches_the_code(name: str) -> None:
    assert pages()[name]() == (ROOT / "docs" / "reference" / name).read_text("utf-8"), "run make docs"


@pytest.mark.parametrize("name", ["process-settings.md", "table-properties.md", "deployment-settings.md"])
def test_each_setting_has_a_meaning(name: str) -> None:
    assert not re.findall(r"^.*\| *\|$", pages()[name](), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    text = FENCED.sub("", page.read_text("utf-8"))
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_page_of_figures_matches_its_data() -> None:
    from documentation.figures import DATA, PAGE, page

    assert page(json.loads(DATA.read_text("utf-8"))) == PAGE.read_text("utf-8")


def test_each_table_of_the_state_store_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "state-store.md").read_text("utf-8")
    migrations = (ROOT / "dormouse" / "postgres" / "migrations").glob("*.sql")
    made = {
        name for path in migrations for name in re.findall(r"create table (\w+)", path.read_text("utf-8"))
    }
    assert {name for name in made if f"`{name}`" not in text and not name.endswith("_default")} <= {
        "dormouse"
    }


def test_each_page_is_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {name for name in there if not name.startswith("decisions/") and name not in listed} == set()


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, in the form that GitHub and the site give them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
