"""Backups of damaged instances: on request, all undamaged objects are backed up, and every loss is
reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import BackupDamaged, ObjectStoreError
from dormouse.objects.folder import FolderStore
from tests.standard import OF_KEYS

pytestmark = pytest.mark.objects

SCHEMA = OF_KEYS


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """An instance with four files of three rows."""
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA)
        for number in range(4):
            table.ingest(pa.table({"key": [10 * number + n for n in range(3)]}))
    return tmp_path / "lake"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.unlink()  # an earlier backup may have the file under another name
    path.write_bytes(data)


@pytest.mark.slow
def test_despite_damage_backs_up_the_rest_and_reports_each_loss(
    lake: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    place, new = tmp_path / "backups", tmp_path / "restored"
    damaged, gone, short, *_ = sorted((lake / "objects/data").rglob("*.parquet"))
    flip(damaged)
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-10])
    names_of = {str(path.relative_to(lake / "objects")) for path in (damaged, gone, short)}
    code, out, err = cli("backup", str(place), "--instance", str(lake))
    assert (code, out) == (1, "")
    assert "--despite-damage" in err
    assert dm.backups(place) == []
    code, out, err = cli("backup", str(place), "--instance", str(lake), "--despite-damage")
    assert code == 0
    assert "3 objects damaged or missing" in err
    [made] = dm.backups(place)
    assert {one.name for one in made.damaged} == names_of
    faults = " ".join(one.fault for one in made.damaged)
    assert all(what in faults for what in ("does not have the bytes", "is not there", "and was written with"))
    code, out, _ = cli("backups", str(place))
    assert (code, "damaged" in out, " 3 " in out) == (0, True, True)
    code, out, err = cli("restore", str(place), "--into", str(new))
    assert (code, out) == (1, "")
    assert "lacks 3 of the objects; the first: " in err
    assert not new.exists()
    code, out, err = cli("restore", str(place), "--into", str(new), "--despite-damage", "--json")
    assert code == 0
    lost = json.loads(out)["lost"]
    assert [(one["table"], one["row_count"]) for one in lost] == [("t", 3)] * 3
    assert "lost: 3 rows of table t, file " in err
    assert "3 files lost" in err
    with dm.local(new) as instance:
        assert {one.kind for one in instance.check(deep=True).problems} == {"object_missing"}
        assert len(instance.check().problems) == 3
        with pytest.raises(ObjectStoreError, match=r"\.parquet"):
            instance.table("t").query().read_all()


@pytest.mark.slow
def test_a_later_backup_of_repaired_files_is_complete(lake: Path, tmp_path: Path) -> None:
    [path, *_] = sorted((lake / "objects/data").rglob("*.parquet"))
    sound = path.read_bytes()
    with dm.local(lake) as instance:
        flip(path)
        first = instance.backup(tmp_path / "new", despite_damage=True)
        assert len(first.damaged) == 1
        assert json.loads((tmp_path / "new" / first.name / "manifest.json").read_text())["format"] == 2
        path.write_bytes(sound)
        second = instance.backup(tmp_path / "new", since="last", despite_damage=True)
        assert (second.damaged, second.since) == ((), first.name)
        assert json.loads((tmp_path / "new" / second.name / "manifest.json").read_text())["format"] == 1
        flip(path)  # a backup does not read files that an earlier backup has
        assert instance.backup(tmp_path / "new", since=second.name).damaged == ()
    assert dm.restore(tmp_path / "new", tmp_path / "again").lost == ()


@pytest.mark.slow
def test_an_unreadable_file_is_recorded(lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unreadable file stands for one on a disk with a bad sector."""
    [path, *_] = sorted((lake / "objects/data").rglob("*.parquet"))
    own = str(path.relative_to(lake / "objects"))
    real = FolderStore.reader

    def reader(self: FolderStore, name: str) -> object:
        if name == own and self.url.endswith("lake/objects"):
            raise ObjectStoreError(f"cannot read {name}: Input/output error")
        return real(self, name)

    monkeypatch.setattr(FolderStore, "reader", reader)
    with dm.local(lake) as instance:
        with pytest.raises(ObjectStoreError, match="Input/output error"):
            instance.backup(tmp_path / "new")
        [damaged] = instance.backup(tmp_path / "new", despite_damage=True).damaged
    assert "cannot be read: cannot read" in damaged.fault


@pytest.mark.slow
def test_despite_damage_restores_the_rest_of_a_damaged_backup(lake: Path, tmp_path: Path) -> None:
    with dm.local(lake) as instance:
        copy = tmp_path / "backups" / instance.backup(tmp_path / "backups").name
    paths = sorted((copy / "objects/data").rglob("*.parquet"))
    flip(paths[0])
    paths[1].unlink()
    with pytest.raises(BackupDamaged):
        dm.restore(tmp_path / "backups", tmp_path / "new")
    made = dm.restore(tmp_path / "backups", tmp_path / "new", despite_damage=True)
    assert {one.filename for one in made.lost} == {
        str(path.relative_to(copy / "objects")) for path in paths[:2]
    }
    with dm.local(tmp_path / "new") as instance:
        assert len(instance.check().problems) == 2
