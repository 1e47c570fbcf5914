"""The store compared with a model of dictionaries, over random batches of valid and invalid updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_model import Expected, StoreModel, counted

from dormouse.errors import BatchFailed, DormouseError
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    CheckAssignmentRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.state.files.operations import CommitResult, Kind
from tests.stored import clock, query
from tests.support.state import LAYOUTS, Catalog, Commit, TableContext

pytestmark = pytest.mark.at_each_isolation

FILES = ["a", "b", "c", "d", "e", "F", "g", "h", "i", "K", "l", "\N{MOUSE} '\"\\{,}"]
PARTITIONS = ["root", "L", "R", "LL", "LR", "Ünï\\\"{}' ,null"]
JOBS = ["j", "k", "NULL"]
IDS = ["1", "2", "3", "'4'", "5", "6"]
EVERYWHERE = [(partition, name) for partition in PARTITIONS for name in FILES]

names = st.sampled_from(FILES)
partitions = st.sampled_from(PARTITIONS)
jobs = st.sampled_from(JOBS)
rows = st.integers(0, 9) | st.just(2**53 + 1)
some_bytes = st.none() | st.binary(max_size=3)


class StoreMachine(RuleBasedStateMachine):
    """A state machine that makes the same updates to the store and to the model.

    `new_table` makes the tables under test.
    """

    new_table: Callable[[], TableContext]

    def __init__(self) -> None:
        super().__init__()
        self.context = self.new_table()
        self.store = self.context.store
        self.catalog = Catalog(self.context.supplier, self.context.attempts)
        self.layout = self.context.table.layout
        self.model = StoreModel()

    def teardown(self) -> None:
        self.catalog.drop(self.context.table.name)

    @initialize(partition=partitions)
    def start(self, partition: str) -> None:
        files = [
            FileWithReferences(
                filename=name,
                references=tuple(
                    FileReference(filename=name, partition_id=p, row_count=10)
                    for p in sorted({"root", partition})
                ),
            )
            for name in FILES[:6]
        ]
        agree(self.store.apply("add_files", [Commit(files)]), self.model.apply("add_files", [Commit(files)]))

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.update(data, "add_files", lambda model: self.a_file(data, model), 0)

    @precondition(lambda self: any(r.job_id is None for r in self.model.references.values()))
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        self.update(data, "assign_job_ids", lambda model: self.a_claim(data, model))

    @precondition(lambda self: any(r.job_id for r in self.model.references.values()))
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        self.update(data, "replace_file_references", lambda model: self.a_replacement(data, model))

    @precondition(lambda self: any(r.job_id is None for r in self.model.references.values()))
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """Replaces all unassigned files of a partition by one file, in one job."""
        free = [key for key, found in self.model.references.items() if found.job_id is None]
        partition = data.draw(st.sampled_from(sorted({partition for partition, _ in free})))
        inputs = tuple(name for p, name in free if p == partition)
        claim = AssignJobIdRequest(job_id="compact", partition_id=partition, filenames=inputs)
        request = ReplaceFileReferencesRequest(
            job_id="compact", partition_id=partition, input_filenames=inputs, new_reference=None
        )
        self.through_the_method("assign_job_ids", Commit([claim]))
        self.through_the_method("replace_file_references", Commit([request]))

    @precondition(lambda self: self.model.references)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        self.update(data, "split_file_references", lambda model: self.a_split(data, model))

    @precondition(lambda self: self.model.unreferenced())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        def a_name(model: StoreModel) -> str:
            return mostly(data, model.unreferenced(), FILES)

        self.update(data, "delete_collected_files", a_name)

    @rule(data=st.data())
    def tend(self, data: st.DataObject) -> None:
        often = [self.unassign, self.stamp, self.check, self.count]
        what = data.draw(st.sampled_from([*often * 3, self.clear]))
        what(data)

    def unassign(self, data: st.DataObject) -> None:
        job_id = data.draw(jobs)
        note(f"unassign {job_id}")
        self.store.unassign_job(job_id)
        self.model.unassign(job_id)

    def stamp(self, _: st.DataObject) -> None:
        note("stamp")
        stamped = self.model.stamp()
        assert self.store.stamp_unreferenced() == stamped

    def count(self, _: st.DataObject) -> None:
        assert counted(self.store.totals.bring_forward()) == self.model.counts()

    def clear(self, _: st.DataObject) -> None:
        note("clear")
        self.store.clear()
        self.model.clear()

    def check(self, data: st.DataObject) -> None:
        claims = [self.a_claim(data, self.model) for _ in range(data.draw(st.integers(0, 2)))]
        requests = [
            CheckAssignmentRequest(job_id=c.job_id, partition_id=c.partition_id, filenames=c.filenames)
            for c in claims
        ]
        note(f"check {requests}")
        try:
            found: Any = self.store.is_assigned(requests)
        except DormouseError as error:
            found = type(error)
        assert found == self.model.is_assigned(requests)

    @rule(layout=st.sampled_from(LAYOUTS))
    def convert(self, layout: str) -> None:
        if layout != self.layout:
            self.model.stamp()
        self.layout = self.catalog.convert_layout(self.context.table, layout).layout

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        store, model = self.store, self.model
        listed = model.listed()
        assert timeless(store.file_references()) == listed
        assert timeless(store.unassigned_file_references()) == [r for r in listed if r.job_id is None]
        assert timeless(store.file_references_in(PARTITIONS[:2])) == model.held_by(PARTITIONS[:2])
        expected: dict[str, list[str]] = {}
        for reference in listed:
            expected.setdefault(reference.partition_id, []).append(reference.filename)
        assert store.partition_to_filenames() == expected
        assert store.has_no_files() == (not model.files)
        assert counted(store.totals.read()) == model.counts()
        assert {c: store.is_applied(c) for c in IDS} == {c: c in model.commits for c in IDS}

    @invariant()
    def tracks_what_the_model_tracks(self) -> None:
        store, model = self.store, self.model
        held = sorted({name for _, name in model.references})
        free = model.unreferenced()
        for limit in {0, max(len(free) - 1, 0), len(free)}:
            found = store.all_files(limit)
            assert timeless_files(found.files) == model.with_references(held + free[:limit], model.listed())
            assert found.more_than_max == (limit < len(free))
        here = model.held_by(PARTITIONS[1:3])
        inside = sorted({r.filename for r in here})
        assert timeless_files(store.files_in(PARTITIONS[1:3])) == model.with_references(inside, here)
        now = clock(store)
        stamped = [name for name in free if model.files[name].stamped]
        assert sorted(store.files_ready_for_gc(now + timedelta(days=9))) == stamped
        assert list(store.files_ready_for_gc(now - timedelta(days=9))) == []

    @invariant()
    def counts_the_references_of_each_file(self) -> None:
        if self.layout == "salted_counts":
            text = """select max(filename), coalesce(sum(count), 0)::integer
                      from file_count where table_id = %s group by file_id"""
            found = query(self.context.supplier, text, self.store.table.table_id)
            expected = {name: sum(n == name for _, n in self.model.references) for name in self.model.files}
            assert dict(found) == expected

    def update(
        self, data: st.DataObject, kind: Kind, draw: Callable[[StoreModel], Any], items_min: int = 1
    ) -> None:
        """Applies commits in one of three ways.

        One commit uses the method of its kind, several use `apply`, and any number can be in one transaction.
        """
        drawn = self.model.copy()
        commits: list[Commit] = []
        for _ in range(data.draw(st.sampled_from([1, 1, 2, 3, 4]), label="commits")):
            if commits and data.draw(st.sampled_from([False] * 5 + [True]), label="again"):
                commits.append(data.draw(st.sampled_from(commits)))
                continue
            size = data.draw(st.sampled_from([items_min, 1, 1, 2, 3]))
            commit_id = data.draw(st.sampled_from([*[None] * 8, *IDS]))
            commit = Commit(
                [draw(drawn) for _ in range(size)], commit_id, same_content=data.draw(st.booleans())
            )
            commits.append(commit)
            drawn.apply(kind, [commit])  # later updates build on it
        way = data.draw(
            st.sampled_from(["apply", "apply", "method", "method", "transaction", "rolled back"]), label="way"
        )
        note(f"{way}: {kind} {commits}")
        if way == "method":
            self.through_the_method(kind, commits[0])
        elif way == "apply":
            agree(self.store.apply(kind, commits), self.model.apply(kind, commits))
        else:
            self.in_a_transaction(kind, commits, way == "rolled back")

    def through_the_method(self, kind: Kind, commit: Commit) -> None:
        items = list(commit.items)
        if kind == "delete_collected_files":
            items = sorted(set(items))
        method = getattr(self.store, "add_files_with_references" if kind == "add_files" else kind)
        (expected,) = self.model.apply(kind, [changed(commit, items=items, same_content=False)])
        errors: list[DormouseError] = []
        applied = None
        try:
            applied = method(commit.items, commit_id=commit.commit_id)
        except BatchFailed as failure:
            errors = list(failure.errors)
            assert list(failure.succeeded) == [x for n, x in enumerate(items) if n not in expected.failed]
        except DormouseError as error:
            errors = [error]
        reasons = [expected.failed[n] for n in sorted(expected.failed)]
        if not reasons:
            assert applied == (expected.state == "applied")
        assert all(type(e) in allowed for e, allowed in zip(errors, reasons, strict=False))
        assert bool(errors) == bool(reasons)

    def in_a_transaction(self, kind: Kind, commits: list[Commit], rolled_back: bool) -> None:
        model = self.model.copy()
        with self.context.supplier.connection() as conn:
            # within a transaction, the store does not notice a conversion by an error
            list(self.store.file_references())
            conn.execute(f"begin isolation level {self.store.table.properties.isolation}")
            found = self.store.apply(kind, commits, conn=conn)
            found += self.store.apply(kind, commits, conn=conn)
            conn.execute("rollback" if rolled_back else "commit")
        agree(found, model.apply(kind, commits) + model.apply(kind, commits))
        if not rolled_back:
            self.model = model

    def a_file(self, data: st.DataObject, model: StoreModel) -> FileWithReferences:
        name = mostly(data, [name for name in FILES if name not in model.files], FILES)
        here = data.draw(
            st.lists(partitions, max_size=3, unique=data.draw(st.sampled_from([True] * 9 + [False])))
        )
        flags = st.booleans()
        references = [
            FileReference(
                filename=name,
                partition_id=partition,
                row_count=data.draw(rows),
                count_approximate=data.draw(flags),
                only_contains_data_for_this_partition=data.draw(flags),
            )
            for partition in here
        ]
        size, keys = data.draw(st.none() | rows), (data.draw(some_bytes), data.draw(some_bytes))
        return FileWithReferences(
            filename=name,
            references=tuple(references),
            byte_count=size,
            row_count=data.draw(st.none() | rows),
            min_key=keys[0],
            max_key=keys[1],
        )

    def a_claim(self, data: st.DataObject, model: StoreModel) -> AssignJobIdRequest:
        free = [key for key, found in model.references.items() if found.job_id is None]
        partition, inputs = self.some_keys(data, free)
        return AssignJobIdRequest(job_id=data.draw(jobs), partition_id=partition, filenames=inputs)

    def a_replacement(self, data: st.DataObject, model: StoreModel) -> ReplaceFileReferencesRequest:
        job_id = mostly(data, sorted({r.job_id for r in model.references.values() if r.job_id}), JOBS)
        held = [key for key, found in model.references.items() if found.job_id == job_id]
        partition, inputs = self.some_keys(data, held)
        fresh = [name for name in FILES if name not in model.files]
        output = mostly(data, [*fresh, None], FILES)
        new = output and FileReference(filename=output, partition_id=partition, row_count=data.draw(rows))
        facts = output and FileWithReferences(filename=output, byte_count=data.draw(rows), min_key=b"\\")
        return ReplaceFileReferencesRequest(
            job_id=job_id,
            partition_id=partition,
            input_filenames=inputs,
            new_reference=new or None,
            new_file=data.draw(st.sampled_from([facts or None, None])),
        )

    def a_split(self, data: st.DataObject, model: StoreModel) -> SplitFileReferenceRequest:
        free = [key for key, found in model.references.items() if found.job_id is None]
        partition, name = mostly(data, free, EVERYWHERE)
        old = FileReference(filename=name, partition_id=partition, row_count=data.draw(rows))
        there = [p for p in PARTITIONS if (p, name) not in model.references]
        targets = list(
            dict.fromkeys(mostly(data, there, PARTITIONS) for _ in range(data.draw(st.integers(1, 3))))
        )
        if len(targets) == 2:
            return SplitFileReferenceRequest.split_to_children(old, *targets)
        news = tuple(changed(old, partition_id=target, row_count=data.draw(rows)) for target in targets)
        return SplitFileReferenceRequest(old_reference=old, new_references=news)

    def some_keys(
        self, data: st.DataObject, wanted: Sequence[tuple[str, str]]
    ) -> tuple[str, tuple[str, ...]]:
        """Draws a partition and files of it: mostly wanted files, and sometimes another one."""
        partition, name = mostly(data, wanted, EVERYWHERE)
        others = [f for p, f in wanted if p == partition and f != name]
        more = data.draw(st.lists(st.sampled_from(others), max_size=2, unique=True)) if others else []
        if data.draw(st.sampled_from([False] * 9 + [True])):
            more.append(data.draw(names))
        return partition, tuple(dict.fromkeys([name, *more]))


def mostly(data: st.DataObject, wanted: Sequence[Any], any_of: Sequence[Any]) -> Any:
    """Draws one of the wanted items if there are any, and sometimes any item."""
    surely = wanted and data.draw(st.sampled_from([True] * 9 + [False]))
    return data.draw(st.sampled_from(wanted if surely else any_of))


def agree(results: Sequence[CommitResult], expected: Sequence[Expected]) -> None:
    assert [result.state for result in results] == [result.state for result in expected]
    for result, other in zip(results, expected, strict=True):
        reasons = {n: type(error) for n, error in result.failed}
        assert reasons.keys() == other.failed.keys()
        assert all(reasons[n] in allowed for n, allowed in other.failed.items()), (reasons, other.failed)


def timeless(references: Any) -> list[FileReference]:
    listed = list(references)
    assert all(reference.last_updated is not None for reference in listed)
    return [changed(reference, last_updated=None) for reference in listed]


def timeless_files(files: Sequence[FileWithReferences]) -> list[FileWithReferences]:
    return [changed(file, references=tuple(timeless(file.references)), last_updated=None) for file in files]


def compare(new_table: Callable[..., TableContext], layout: str, isolation: str, **profile: Any) -> None:
    tables = count()

    class Machine(StoreMachine):
        @staticmethod
        def new_table() -> TableContext:
            # few salts, so that references of one file meet in one count
            return new_table(layout=layout, isolation=isolation, salt_buckets=1 + next(tables) % 3)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            # failures are not shrunk, as that takes minutes
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            **profile,
        ),
    )


@pytest.mark.slow
def test_the_store_does_what_the_model_does(
    new_table: Callable[..., TableContext], layout: str, isolation: str
) -> None:
    """The updates differ in each run. A failure is printed as a program that repeats it."""
    compare(new_table, layout, isolation, max_examples=6, stateful_step_count=50)
