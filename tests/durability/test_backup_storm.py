"""Backups that are killed at random moments while everything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backup_storm import storm


@pytest.mark.slow
def test_a_killed_backup_is_whole_or_absent(tmp_path: Path) -> None:
    ended = storm(tmp_path, seconds=0, seed=1, least=4)
    assert min(ended["killed"], ended["whole"]) >= 4
