"""How deep the conditions get that Spark is given: it walks down step by step, until its stack overflows."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.spark import frames


class Deep(int):
    """A condition, as deep as it is."""

    def __and__(self, other: int) -> Deep:
        return Deep(max(self, other) + 1)

    __or__ = __and__


def test_thousands_of_parts_are_no_chain_of_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = [Deep(0)] * 5_000
    depths: Any = frames._any(parts), frames._all(parts)
    assert depths == (13, 13)
    monkeypatch.setattr(frames, "_is_of", lambda schema, deletion: deletion)
    monkeypatch.setattr(frames, "lit", lambda value: value)
    monkeypatch.setattr(frames, "coalesce", lambda found, otherwise: found)
    assert frames.remains(None, parts) == ~13  # type: ignore[arg-type]
