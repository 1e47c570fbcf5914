"""Tests that the page of the stacks shows every stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.assembly import CONFIGURATIONS, Assembly

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "stacks.md").read_text("utf-8")
DRAWN = set(re.findall(r"^  (\w+)[\[(]", PAGE, re.MULTILINE))
OPTIONAL = set(re.findall(r"class ([\w,]+) optional", PAGE)[0].split(","))


def stacks(assembly: Assembly) -> set[str]:
    names = {name.removeprefix(f"dormouse-{assembly.id}-") for name in assembly.templates}
    return names - {"copy"}  # the row of `backup` describes it


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_stack_is_drawn(synthesized: Callable[[str], Assembly], name: str) -> None:
    assert DRAWN - OPTIONAL <= stacks(synthesized(name)) <= DRAWN


def test_every_drawn_stack_is_explained_and_exists_in_some_configuration(
    synthesized: Callable[[str], Assembly],
) -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == DRAWN
    assert set[str]().union(*(stacks(synthesized(name)) for name in CONFIGURATIONS)) == DRAWN


def test_arrows_lead_from_box_to_box() -> None:
    for line in re.findall(r"^  (.+) --> (.+)$", PAGE, re.MULTILINE):
        assert {name for side in line for name in side.split(" & ")} <= DRAWN
