"""Tests that the page of the stacks shows every stack, and every part of the stack `application`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.assembly import CONFIGURATIONS, PARTS, Assembly

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "stacks.md").read_text("utf-8")
DRAWN = set(re.findall(r"^ +(?:subgraph )?(\w+)[\[(]", PAGE, re.MULTILINE))
INSIDE = set(re.findall(r"^    (\w+)[\[(]", PAGE, re.MULTILINE))
OPTIONAL = set(re.findall(r"class ([\w,]+) optional", PAGE)[0].split(","))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_stack_and_part_is_drawn(synthesized: Callable[[str], Assembly], name: str) -> None:
    assert DRAWN - OPTIONAL <= set(synthesized(name).templates) <= DRAWN


def test_every_drawn_box_is_explained_and_exists_in_some_configuration(
    synthesized: Callable[[str], Assembly],
) -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == DRAWN
    synthesized_names = set[str]().union(*(synthesized(name).templates for name in CONFIGURATIONS))
    assert synthesized_names | {"policies"} == DRAWN  # no configuration has `iam.policies`


def test_the_parts_are_drawn_within_the_application_stack() -> None:
    assert set(PARTS) == INSIDE


def test_arrows_lead_from_box_to_box() -> None:
    for line in re.findall(r"^  (.+) --> (.+)$", PAGE, re.MULTILINE):
        assert {name for side in line for name in side.split(" & ")} <= DRAWN
