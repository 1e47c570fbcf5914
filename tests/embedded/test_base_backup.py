"""Base backups, which can be unpacked only into their own folder, on every release of Python 3.11."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dormouse.embedded import postgres
from dormouse.embedded.postgres import extract
from dormouse.errors import BackupDamaged


@pytest.fixture(params=[True, False])
def has_filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: like Python before 3.11.4, which has no filters for archives, and like later
    releases.
    """
    if not request.param:
        monkeypatch.setattr(postgres, "_AS_DATA", {})


def archive(path: Path, *members: tuple[str, bytes | None]) -> Path:
    """Writes an archive with a file for each name and content; None instead of content makes a link to
    outside.
    """
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, str(path.parent)
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
    return path


@pytest.mark.usefixtures("has_filters")
def test_files_are_unpacked(tmp_path: Path) -> None:
    extract(archive(tmp_path / "a.tar.gz", ("PG_VERSION", b"18"), ("base/1/2", b"x")), tmp_path / "data")
    assert (tmp_path / "data/base/1/2").read_bytes() == b"x"
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("has_filters")
@pytest.mark.parametrize("hostile", [("../escaped", b"x"), ("/tmp/escaped", b"x"), ("link", None)])  # noqa: S108
def test_nothing_is_unpacked_outside_of_the_folder(tmp_path: Path, hostile: Any) -> None:
    made = archive(tmp_path / "a.tar.gz", ("PG_VERSION", b"18"), hostile)
    with pytest.raises(BackupDamaged, match=f"{hostile[0]!r} is not a file of a database"):
        extract(made, tmp_path / "data")
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar.gz", "data"}
