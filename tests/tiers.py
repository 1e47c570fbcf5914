"""The choice of tests that only the slow tier runs.

The fast tier runs a test for all layouts on only one of them. It runs only a few cases of tests with many
cases. If a test combines cases, it runs each case once. Both tiers run the conformance suite on all layouts,
but the fast tier runs it with serializable isolation on only one. A test that goes through many cases or
sizes by itself asks for those of the tier that runs.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from dormouse.state.files.layout import LAYOUTS

MATRIX_MIN = 8
FAST = "fast tier"
"""The name of the fast tier's profile of Hypothesis."""
T = TypeVar("T")


def by_tier(fast: T, thorough: T) -> T:
    """Returns the first value in a run of the fast tier only, and the second in all others."""
    return fast if settings.get_current_profile_name() == FAST else thorough


def sampled(cases: Sequence[T], kept: int) -> list[T]:
    """Returns all cases, but in the fast tier only `kept` of them, evenly spread, with the first."""
    kept = by_tier(min(kept, len(cases)), len(cases))
    return [cases[n * len(cases) // kept] for n in range(kept)]


def leave_layouts_to_the_slow_tier(items: list[pytest.Item]) -> None:
    """Moves all but one layout of each test to the slow tier.

    A hash of the test's name chooses the layout that stays, so that each layout stays in some tests.
    """
    twins: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        layouts = [*_layouts(item)] if _uses_database(item) or _is_serializable(item) else []
        if len(layouts) == 1:
            twins[item.nodeid.replace(layouts[0], "")][layouts[0]] = item
    for name, on in twins.items():
        for layout, item in on.items():
            if layout != _kept(name) and len(on) == len(LAYOUTS):
                item.add_marker(pytest.mark.slow)


def _uses_database(item: pytest.Item) -> bool:
    """Returns whether a test runs against PostgreSQL; False for tests of the store's contract."""
    return "databases" in getattr(item, "fixturenames", ()) and item.path.parent.name != "conformance"


def _kept(name: str) -> str:
    return LAYOUTS[zlib.crc32(name.encode()) % len(LAYOUTS)]


def _is_serializable(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("isolation") == "serializable"


def _layouts(item: pytest.Item) -> Iterator[str]:
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        for one in value if isinstance(value, tuple) else [value]:
            if isinstance(one, str) and one in LAYOUTS:
                yield one


def leave_matrices_to_the_slow_tier(items: list[pytest.Item]) -> None:
    """Moves tests that combine cases to the slow tier, except a diagonal that has each case at least once."""
    matrices: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if _uses_database(item) and not item.get_closest_marker("slow"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for tests in matrices.values():
        given = [_names(mark.args[0]) for mark in tests[0].iter_markers("parametrize")]
        named = {name for names in given for name in names}
        firsts = [names[0] for names in given]
        firsts += [name for name in _parameters(tests[0]) if name not in named]  # those of fixtures
        if len(tests) < MATRIX_MIN or len(firsts) < 2:
            continue
        # each combination has the same objects
        sides = [list(dict.fromkeys(id(test.callspec.params[name]) for test in tests)) for name in firsts]
        lengths = [len(side) for side in sides]
        longest = lengths.index(max(lengths))
        for test in tests:
            at = [sides[n].index(id(test.callspec.params[name])) for n, name in enumerate(firsts)]
            if at != [at[longest] % length for length in lengths]:
                test.add_marker(pytest.mark.slow)


def _names(names: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]


def _parameters(item: Any) -> list[str]:
    return [*item.callspec.params] if hasattr(item, "callspec") else []


def leave_cases_to_the_slow_tier(items: list[pytest.Item]) -> None:
    """Moves cases of tests that are marked `few` to the slow tier. The mark has the number of cases that
    stay.
    """
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("few")
        if mark is not None and not item.get_closest_marker("slow"):
            seen[name := item.nodeid.partition("[")[0]] += 1
            if seen[name] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
