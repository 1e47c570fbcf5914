"""A server that must start although the disk of its folder is full."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dormouse.errors import InstanceError
from tests.support.embedded import EmbeddedPostgres

pytestmark = pytest.mark.slow


@pytest.fixture
def disk() -> Iterator[Path]:
    """Yields a folder on a small file system."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=150m,mode=755", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        folder.rmdir()
        pytest.skip("this machine lets nothing be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def test_a_full_disk_at_the_start_is_reported_in_one_line(disk: Path) -> None:
    lake = disk / "lake"
    with EmbeddedPostgres(lake):
        pass
    fill = disk / "fill"
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4_096))
    with pytest.raises(InstanceError) as reported, EmbeddedPostgres(lake):
        pass
    assert "its disk is full: make room, and open it again" in str(reported.value)
    assert " | " not in str(reported.value)
    fill.unlink()
    with EmbeddedPostgres(lake):
        pass
