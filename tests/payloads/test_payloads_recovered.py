"""A restored and adopted database whose payloads were folded after the restored time."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest

import dormouse as dm
from dormouse.errors import InvalidInput, PayloadCorrupt, PayloadNotFound
from dormouse.jobs.job import upload_name
from dormouse.payloads import PayloadKey, cooling
from dormouse.payloads.pack import PayloadObjects
from tests.cooling import AT, DAY, Model, key, names, stored, tools
from tests.stored import query
from tests.support.api import Instance
from tests.support.model import KEPT_SECONDS, TableProperties

FOLDED_AT = AT - timedelta(days=1)
FOLDED = FOLDED_AT.date()


def hours_pass(instance: Instance, hours: int) -> None:
    query(
        instance._supplier,
        "update payload_object set changed_at = changed_at - make_interval(hours => %s)",
        hours,
    )


def snapshot(home: Path, to: Path) -> None:
    shutil.copytree(home / "postgres", to, symlinks=True)
    shutil.copystat(home / "postgres", to)


def put_back(home: Path, snapshot: Path) -> None:
    shutil.rmtree(home / "postgres")
    shutil.copytree(snapshot, home / "postgres", symlinks=True)
    shutil.copystat(snapshot, home / "postgres")


def lake(tmp_path: Path, hours: int) -> dict[PayloadKey, object]:
    """Restores an instance to its state `hours` ago, before its days were folded; returns its payloads.

    At that time, one day was offloaded; later, the other was folded. After it, one payload of each day was
    deleted, one replaced and one added.
    """
    home = tmp_path / "lake"
    with dm.local(home) as instance:
        model = Model.filled(instance, 40)
        model.put(*(key(name, FOLDED_AT) for name in names(40)))
        cooling.offload(tools(instance), None, False)
        cooling.fold(tools(instance), FOLDED)
    snapshot(home, tmp_path / "snapshot")
    with dm.local(home) as instance:
        for at in (AT, FOLDED_AT):
            instance.payloads.delete(*key("a0004", at))
            instance.payloads.put_many([(*key(name, at), "newer") for name in ("a0006", "a0007")])
            assert cooling.fold(tools(instance), at.date()).days[0].finished
        hours_pass(instance, hours)
        assert (instance.payloads.collect().deleted > 0) == (hours > 24)
    put_back(home, tmp_path / "snapshot")
    return model.expected


@pytest.mark.slow
def test_payloads_folded_in_the_last_day_are_read_by_a_restored_database(tmp_path: Path) -> None:
    assert TableProperties().history_retention_seconds == KEPT_SECONDS
    expected = lake(tmp_path, 23)
    reported: list[str] = []
    with dm.local(tmp_path / "lake") as instance:
        instance.adopt(tell=reported.append)
        assert instance.payloads.get_many(expected) == expected
        assert (instance.check(deep=True).problems, reported) == ((), [])
        hours_pass(instance, 25)
        assert instance.payloads.collect().deleted == 0, "an adoption holds objects that both databases know"


@pytest.mark.slow
def test_payloads_of_lost_objects_are_found_in_others_or_reported(tmp_path: Path) -> None:
    expected = lake(tmp_path, 25)
    reported: list[str] = []
    with dm.local(tmp_path / "lake") as instance:
        instance.adopt(tell=reported.append)
        assert [line.split(":")[0] for line in reported] == [f"payloads of {FOLDED}", f"payloads of {DAY}"]
        assert "not all: see 'dormouse payloads verify" in reported[1]
        lost = {key("a0004"), key("a0006")}

        def of_day() -> dict[PayloadKey, object]:
            return instance.payloads.get_many(one for one in expected if one.day == DAY)

        found = of_day()
        assert {one for one, content in found.items() if isinstance(content, PayloadCorrupt)} == lost
        assert all(found[one] == expected[one] for one in found.keys() - lost)
        with pytest.raises(PayloadNotFound):  # only the other database added it
            instance.payloads.get(*key("a0007"))
        # the report lists only objects that were rebuilt
        verified = instance.payloads.verify(DAY, rebuild=True)
        assert (verified.rebuilt, verified.recovered) == (0, 0)
        assert sum(int(one.detail.split(", and ")[1].split()[0]) for one in verified.problems) == len(lost)
        assert of_day().keys() == found.keys()
        # until a caller deletes the lost payloads
        instance.payloads.delete_many(lost)
        assert instance.payloads.verify(DAY, rebuild=True).problems == ()
        assert instance.payloads.verify(DAY).problems == ()

        # there is no record of the payloads of lost blocks
        gone = instance.payloads.verify(FOLDED)
        assert all("it is not there, and had" in one.detail for one in gone.problems)
        verified = instance.payloads.verify(FOLDED, rebuild=True)
        assert verified.rebuilt > 0
        assert len(verified.problems) == len(
            [one for one in verified.problems if " were found, as they are" in one.detail]
        )
        changed = {key(name, FOLDED_AT) for name in ("a0004", "a0006")}
        found = instance.payloads.get_many(one for one in expected if one.day == FOLDED)
        assert {one for one, content in found.items() if content != expected[one]} == changed
        assert isinstance(found[key("a0004", FOLDED_AT)], PayloadNotFound)
        assert instance.payloads.verify(FOLDED).problems == ()
        assert instance.check(deep=True).problems == ()
        assert {one.days_left for one in (instance.payloads.fold(DAY), instance.payloads.fold(FOLDED))} == {0}


@pytest.fixture
def model(instance: Instance) -> Model:
    return Model.filled(instance, 40)


def test_objects_of_another_timeline_add_nothing(instance: Instance, model: Model) -> None:
    """Writes and deletions of another database do not belong to this one."""
    cooling.offload(tools(instance), None, False)
    query(instance._supplier, "update incarnation set reason = 'adoption'")
    [(name,), *_] = query(instance._supplier, "select object_key from payload_object")
    gone = [
        key(id_) for (id_,) in query(instance._supplier, "select id from payload where object_key = %s", name)
    ]
    model.delete(*gone)
    query(instance._supplier, "delete from payload_object where object_key = %s", name)
    assert instance.payloads.verify(DAY, rebuild=True).rebuilt == 0
    model.check(*gone)


@pytest.mark.slow
def test_maintenance_looks_for_lost_objects_while_an_adoption_holds_files(
    instance: Instance, model: Model
) -> None:
    cooling.offload(tools(instance), None, False)
    [(name,), *_] = query(instance._supplier, "select object_key from payload_object")
    copy = f"payloads/{DAY}/000009-{'c' * 20}"
    instance._objects.put(copy, instance._objects.get(name))
    instance._objects.delete([name])
    assert "does not exist" in instance.payloads.maintain().errors[0]
    with pytest.raises(PayloadCorrupt):
        [instance.payloads.get(*one) for one in model.expected]
    query(
        instance._supplier,
        "insert into hold (holder, since, until) values ('adoption 2', 'epoch', 'infinity')",
    )
    assert instance.payloads.maintain().errors == ()
    model.check()
    assert query(instance._supplier, "select state from payload_object where object_key = %s", copy) == [
        ("block",)
    ]


def test_a_backup_has_no_objects_that_died_before_it(instance: Instance, model: Model) -> None:
    cooling.offload(tools(instance), None, False)
    instance.payloads.expire(DAY + timedelta(1))
    known = PayloadObjects(instance._supplier, instance._objects)
    assert list(known.written()) == []
    query(
        instance._supplier,
        "insert into hold (holder, since, until) values ('backup', now() - interval '1 hour', 'infinity')",
    )
    assert [one.needed for one in known.written()].count(False) > 0


def test_one_setting_has_the_time_that_unneeded_objects_are_kept(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_OBJECTS_KEPT_SECONDS", "7200")
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        Model.filled(instance, 3)
        cooling.offload(tools(instance), None, False)
        instance.payloads.expire(DAY + timedelta(1))
        sent = upload_name("never started")
        instance._objects.put(sent, b"1")
        for hours, kept in ((1, True), (3, False)):
            query(
                instance._supplier,
                "update payload_object set changed_at = now() - make_interval(hours => %s)",
                hours,
            )
            os.utime(tmp_path / "objects" / sent, times=(time.time() - 3_600 * hours,) * 2)
            instance._durability.cool_payloads()
            instance._daily()["jobs"]()
            assert (bool(stored(instance)), [*instance._objects.list("answers")] != []) == (kept, kept)


def test_objects_may_be_deleted_sooner_on_demand(instance: Instance, model: Model) -> None:
    cooling.offload(tools(instance), None, False)
    instance.payloads.expire(DAY + timedelta(1))
    assert instance.payloads.collect(0).deleted == 0, "objects are kept for readers for 15 minutes"
    hours_pass(instance, 1)
    assert instance.payloads.collect().deleted == 0
    assert instance.payloads.collect(0).deleted > 0
    with pytest.raises(InvalidInput, match="kept_seconds must be from 0 to"):
        instance.payloads.collect(-1)
