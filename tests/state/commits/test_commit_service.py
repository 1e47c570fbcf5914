"""Wrong arguments to the commit queue, and settings that change while requests wait."""

from __future__ import annotations

from pathlib import Path

import pytest

import dormouse as dm
from dormouse.errors import InvalidCommitRequest, InvalidInput
from tests.commits import add
from tests.standard import OF_KEYS
from tests.stored import live


def test_requests_in_queues_that_were_removed_from_the_settings_are_applied(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = (tmp_path / "objects").as_uri()
    names = [f"t{number}" for number in range(6)]
    monkeypatch.setenv("DORMOUSE_QUEUES", "4")
    with dm.connect(dsn, objects) as instance:
        for name in names:
            instance.create_table(name, OF_KEYS)
        instance.submit([add(name, f"of {name}") for name in names])
        assert len([depth for depth in instance.commits.depths() if depth.messages]) > 1
    monkeypatch.setenv("DORMOUSE_QUEUES", "1")
    with dm.connect(dsn, objects) as instance:
        assert {outcome.state for outcome in instance.committer().drain()} == {"applied"}
        assert [len(live(instance.table(name).files)) for name in names] == [1] * 6


def test_mistakes_are_one_clear_line(dsn: str, tmp_path: Path) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        with pytest.raises(InvalidCommitRequest, match="submit takes a list"):
            instance.submit(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=r"write \['ab'\]"):
            instance.wait_for_commits("ab", seconds_max=1)
    with pytest.raises(InvalidInput, match="attempt_id must be a UUID in hexadecimal"):
        add("t", "a", attempt_id="no uuid")
