"""Items of every kind of update of the file reference store: valid items, and one for each error."""

from __future__ import annotations

from typing import Any

from dormouse.errors import (
    FileAlreadyExists,
    FileHasReferences,
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
)
from dormouse.state.files.operations import Kind
from dormouse.state.files.store import FileReferenceStore
from tests.stored import assign, file, ref, remove, replace, split

KINDS: tuple[Kind, ...] = (
    "add_files",
    "assign_job_ids",
    "replace_file_references",
    "split_file_references",
    "delete_collected_files",
)


def prepared(store: FileReferenceStore, kind: Kind, commits: int = 7) -> list[Any]:
    """Returns a valid item for each of `commits` commits, after storing the files and references that they
    need.
    """
    names = [f"f{n}" for n in range(commits)]
    if kind == "add_files":
        return [file(name, ref(name), ref(name, "L")) for name in names]
    store.add_files(ref(name) for name in names)
    if kind == "assign_job_ids":
        return [assign(f"job {name}", "root", name) for name in names]
    if kind == "split_file_references":
        return [split(ref(name)) for name in names]
    if kind == "delete_collected_files":
        remove(store, *names)
        return names
    store.assign_job_ids(assign(f"job {name}", "root", name) for name in names)
    return [replace(f"job {name}", [name], f"new {name}") for name in names]


def bad_ones(store: FileReferenceStore, kind: Kind) -> dict[type[Exception], Any]:
    """Returns an invalid item for each error that an update of this kind can raise."""
    store.add_files([ref("bad"), ref("held"), ref("also held"), ref("split"), ref("split", "R")])
    store.assign_job_ids([assign("holder", "root", "held", "also held"), assign("holder", "R", "split")])
    bad: dict[Kind, dict[type[Exception], Any]] = {
        "add_files": {
            FileAlreadyExists: file("bad"),
            FileReferenceAlreadyExists: file("x", ref("x"), ref("x")),
        },
        "assign_job_ids": {
            FileReferenceNotFound: assign("x", "L", "bad"),
            FileReferenceAssignedToJob: assign("x", "root", "bad", "held"),
        },
        "replace_file_references": {
            FileNotFound: replace("holder", ["held", "none"], "x"),
            FileReferenceNotFound: replace("holder", ["held"], "y", "L"),
            FileReferenceNotAssignedToJob: replace("holder", ["also held", "bad"], "z"),
            FileAlreadyExists: replace("holder", ["held"], "bad"),
        },
        "split_file_references": {
            FileNotFound: split(ref("none")),
            FileReferenceNotFound: split(ref("bad", "M")),
            FileReferenceAssignedToJob: split(ref("held")),
            FileReferenceAlreadyExists: split(ref("split")),
        },
        "delete_collected_files": {FileNotFound: "none", FileHasReferences: "bad"},
    }
    return bad[kind]
