"""Rows that DuckDB spills to disk: no other user of the machine can read them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dormouse.reading.sql.engine import Engine
from dormouse.reading.sql.workers import WorkerLimits, Workers
from tests.serving import SECONDS_MAX
from tests.support.objects import open_store
from tests.support.reading import Interruption

MEMORY = 512 * 1024**2
SORTED = "SELECT range AS n FROM range(3_000_000) ORDER BY md5(range::VARCHAR) || repeat('x', 200)"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a new folder the place of all users' temporary files.

    In it, another user has already created folders with the names that Dormouse could be expected to use.
    """
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    for name in ("dormouse-sql", "dormouse-temporary"):
        squatted = folder / f"{name}-{os.geteuid()}"
        squatted.mkdir()
        squatted.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def workers(shared: Path, tmp_path: Path) -> Iterator[Workers]:
    limits = WorkerLimits(1, memory_bytes_max=MEMORY, wait_seconds_max=SECONDS_MAX)
    with closing(Workers(open_store(tmp_path / "objects"), limits).start()) as started:
        yield started


@pytest.mark.slow
def test_a_worker_s_folder_and_files_are_its_user_s_alone(shared: Path, workers: Workers) -> None:
    squatted = shared / f"dormouse-sql-{os.geteuid()}"
    with closing(workers.session(Interruption())) as session:
        [area] = shared.glob(f"{squatted.name}-*")
        assert area.stat().st_mode & 0o7777 == 0o700
        assert list(area.glob("*/owner.lock"))
        status = Path(f"/proc/{session._worker.process_id}/status")
        if status.exists():
            assert "Umask:\t0077\n" in status.read_text()
    assert list(squatted.iterdir()) == []


@pytest.mark.slow
def test_a_worker_spills_where_no_other_user_may_look(shared: Path, workers: Workers) -> None:
    with closing(workers.session(Interruption())) as session:
        next(session.rows({}, SORTED, ()).batches)
        spilled = [path for path in shared.rglob("spill/*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in spilled} == {0o600}
    assert {path.relative_to(shared).parts[0] for path in spilled} == {
        path.name for path in shared.glob(f"dormouse-sql-{os.geteuid()}-*")
    }


def test_an_engine_in_this_process_spills_into_a_private_folder(shared: Path, tmp_path: Path) -> None:
    with closing(Engine(open_store(tmp_path))) as engine, closing(engine.session(Interruption())) as session:
        [value] = next(
            session.rows({}, "SELECT current_setting('temp_directory') AS folder", ()).batches
        ).to_pydict()["folder"]
    own = Path(value).parent
    assert [one.stat().st_mode & 0o7777 for one in (own, own.parent)] == [0o700, 0o700]
    assert own.parent.parent == shared
    assert own.parent.name.startswith(f"dormouse-temporary-{os.geteuid()}-")
