"""Messages of a forger, a broken sender or a newer Dormouse: commit requests, changed at random by a seed.

All messages are addressed to one table, but they can name files of other tables, because a message can
contain anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from uuid import UUID

from dormouse.model.table import TableRecord
from dormouse.objects import ObjectStore
from dormouse.state.commits.pointers import new_name
from dormouse.state.commits.requests import POINTER

COUNTS = (0, 1, 100, 2**31, 2**63 - 1)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, float("nan"), 2**31, -(2**63), 2**63 - 1, 2**63, 2**64, 10**4000,
    "", "\0", "\ud800", "a\udc00b", "\n", "x" * 257, "x" * 1025, "é" * 600, "%s", "{}", "1970-01-01", "YQ",
    [], {}, [[]], [None], {"": None}, ["root", "root"],
)  # fmt: skip
NAMES = (
    "../x", "a/../../x", "/etc/passwd", "s3://bucket/x", "file:///x", "instance.json", "owner/1.json",
    ".", "", ".staging/x", "commits/x", "runs/x", "work/x", "backups/x", "payloads/x", "activity/x",
    "data/t1", "data/t01/x", "data/t\uff11/x", "data//t1/x", "a\\..\\b", "a b", "a%2f..%2fb", "é",
    "\ud800", "a\0b", "a\nb", "~", "-rf", "x" * 300, "y/" * 480 + "y", "instance.json.sketches",
    "data/t1/x", f"data/{'0' * 32}/x", "landing/a.parquet",
)  # fmt: skip
"""The names of files, some of which a table may have."""
TABLES: dict[str, tuple[Any, ...]] = {
    "table_id": (None, True, -1, 0, 2**31 - 1, 2**31, 2**64, 999, "1", 1.5, [1], {"1": 1}),
    "table_uuid": ("", "0" * 32, "F" * 32, "0" * 31, 7, "data/../t", ["0" * 32]),
    "table": (None, "", "T", "nobody", "t\0", "\ud800", 7, ["t"], "x" * 300),
}
"""Invalid values for the address of a message. Another existing table is not among them: it would be
valid.
"""
KINDS = (
    "add_files", "assign_job_ids", "replace_file_references", "split_file_references",
    "delete_collected_files", "split_partition", "edit_tables",
)  # fmt: skip


class Forger:
    """A maker of message bodies for a table. `names` are existing files, both of the table and of others."""

    def __init__(
        self,
        seed: int,
        table: TableRecord,
        names: Sequence[str],
        attempts: Sequence[str],
        objects: ObjectStore,
    ) -> None:
        self._dice = random.Random(seed)
        self._seed = seed
        self._table_id = table.table_id
        self._names = [*names, *NAMES]
        self._likely = [f"{table.object_prefix}forged-{n}" for n in range(6)]
        self._attempts = [*attempts, "0a" * 16, "f" * 32]
        self._objects = objects
        self._made = 0
        self._next: list[dict[str, Any]] = []

    def body(self) -> str:
        """Returns the body of one message, which may be so malformed that no queue takes it."""
        if not self._next and self._dice.random() < 0.1:
            self._next = self._theft(self._dice.choice(self._names))
        if self._next:
            return _text(self._next.pop())
        request, how = self._request(), self._dice.random()
        if how < 0.45:
            for _ in range(self._dice.randint(1, 3)):
                self._mutate(request)
        text = _text(request)
        if 0.4 < how < 0.7:
            text = self._spoilt(text)
        return self._pointer(text) if self._dice.random() < 0.1 else text

    def _theft(self, name: str) -> list[dict[str, Any]]:
        """Returns requests that add and drop a file, the last first.

        If they were applied, garbage collection would delete the file.
        """
        job = {"job_id": f"theft {self._made}", "partition_id": "root"}
        return [
            self._head("replace_file_references") | {"requests": [{**job, "input_filenames": [name]}]},
            self._head("assign_job_ids") | {"requests": [{**job, "filenames": [name]}]},
            self._head("add_files")
            | {"files": [{"filename": name, "references": [{"partition_id": "root", "row_count": 1}]}]},
        ]

    def _head(self, kind: str) -> dict[str, Any]:
        self._made += 1
        number = self._made if self._dice.random() < 0.9 else self._dice.randint(1, self._made)
        head = {"type": kind, "version": 1, "commit_id": f"forged {self._seed} {number}", "table": "t"}
        return head | ({"table_id": self._table_id} if self._dice.random() < 0.8 else {})

    def _request(self) -> dict[str, Any]:
        kind = self._dice.choice(KINDS)
        return self._head(kind) | {
            "add_files": lambda: {"files": self._some(self._file)} | self._attempt(),
            "assign_job_ids": lambda: {"requests": self._some(self._assignment)},
            "replace_file_references": lambda: {"requests": self._some(self._replacement)} | self._attempt(),
            "split_file_references": lambda: {"requests": self._some(self._split)},
            "delete_collected_files": lambda: {"filenames": self._some(self._name)},
            "split_partition": lambda: {
                "partition_id": self._partition(),
                "point": self._dice.choice([{"int": self._made % 9}, {"str": "b"}, {"bytes": "YQ=="}]),
            },
            "edit_tables": lambda: {"table_id": self._table_id, "parts": [self._edit()]},
        }[kind]()  # fmt: skip

    def _edit(self) -> dict[str, Any]:
        condition = self._dice.choice(['{"key": 1}', "{}", "[1]", "{", '{"other": 1}'])
        bounds = self._dice.choice([[[], []], [[None], [None]], [["YQ=="], ["YQ=="]], [["YQ=="], []]])
        attempts = self._dice.choices(self._attempts, k=1) if self._dice.random() < 0.2 else []
        snapshot = self._dice.choice(["1:1:", "9999:9999:", "1:9:3,5", "9:1:"])
        return {"table": "t", "table_id": self._table_id, "attempt_ids": attempts} | {
            "files": self._some(self._file),
            "deletions": [{"condition": condition, "bounds": bounds, "by_values": self._dice.random() < 0.5}],
            "reads": [{"snapshot": snapshot, "spans": [["", "YQ=="]], "are_keys": self._dice.random() < 0.5}],
            "schema_version": self._dice.choice([None, 1, 2]),
        }

    def _some(self, make: Any) -> list[Any]:
        return [make() for _ in range(self._dice.choice([1, 1, 1, 2, 4]))]

    def _name(self) -> str:
        return self._dice.choice(self._likely if self._dice.random() < 0.6 else self._names)

    def _partition(self) -> str:
        return self._dice.choice([*["root"] * 8, "L", "nowhere", "\u221e"])

    def _job(self) -> str:
        return f"job {self._dice.randrange(4)}"

    def _attempt(self) -> dict[str, str]:
        return {"attempt_id": self._dice.choice(self._attempts)} if self._dice.random() < 0.2 else {}

    def _reference(self, **named: str) -> dict[str, Any]:
        found = {**named, "partition_id": self._partition(), "row_count": self._dice.choice(COUNTS)}
        return found | ({"job_id": self._job()} if self._dice.random() < 0.2 else {})

    def _file(self) -> dict[str, Any]:
        facts = {"byte_count": self._dice.choice(COUNTS), "row_count": self._dice.choice(COUNTS)}
        return {
            "filename": self._name(),
            "references": self._some(self._reference),
            **facts,
            "min_key": "YQ==",
        }

    def _assignment(self) -> dict[str, Any]:
        return {"job_id": self._job(), "partition_id": self._partition(), "filenames": self._some(self._name)}

    def _replacement(self) -> dict[str, Any]:
        inputs = {**self._assignment(), "input_filenames": self._some(self._name)}
        del inputs["filenames"]
        new = self._reference(filename=self._name()) | {"partition_id": inputs["partition_id"]}
        return {**inputs, "new_reference": new} if self._dice.random() < 0.5 else inputs

    def _split(self) -> dict[str, Any]:
        return {
            "old_reference": self._reference(filename=self._name()),
            "new_references": [{**self._reference(), "partition_id": leaf} for leaf in ("L", "R")],
        }

    def _mutate(self, request: dict[str, Any]) -> None:
        place: Any = request
        while (inner := _containers(place)) and self._dice.random() < 0.7:
            place = self._dice.choice(inner)
        where = (
            self._dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if place
            else None
        )
        how = self._dice.random()
        if isinstance(place, list):
            if where is None or how < 0.2:
                place += deepcopy(self._dice.choices([*VALUES, *place], k=self._dice.choice([1, 3, 2_000])))
            else:
                place[where] = self._value(None)
        elif where is None or how < 0.15:
            place[self._dice.choice(["new_key", "", "\ud800", "filename", "typed_point"])] = self._value(None)
        elif how < 0.25:
            del place[where]
        else:
            place[where] = self._value(where)

    def _value(self, key: str | None) -> Any:
        if key in TABLES:
            return self._dice.choice(TABLES[key])
        if key == "type":
            return self._dice.choice([*KINDS, "truncate_table", POINTER, 7, None])
        if key == "version":
            return self._dice.choice([0, 2, 99, -1, "1", 1.0, True, None, 10**30])
        return deepcopy(self._dice.choice([*VALUES, self._name()]))

    def _spoilt(self, text: str) -> str:
        where = self._dice.randrange(len(text))
        return self._dice.choice(
            [
                lambda: text[:where],
                lambda: f"{text[:where]}\0{text[where:]}",
                lambda: f"{text[:where]}\ud800{text[where:]}",
                lambda: text[:where] + chr(self._dice.randrange(32, 127)) + text[where + 1 :],
                lambda: _repeated(text, '"commit_id":"other",'),
                # a repeated key, which would lead to another table if the first or the last value were used
                lambda: _repeated(text, '"table_id":1,') if '"table_id":' in text else "{",
                lambda: f'{text[:-1]},"table_id":1}}' if '"table_id":' in text else "}",
                lambda: '{"a":' * 5_000 + text + "}" * 5_000,
                lambda: f'{text[:-1]},"files":' + "[" * 50_000 + "]" * 50_000 + "}",
                lambda: "".join(chr(self._dice.randrange(1, 0x250)) for _ in range(where)),
            ]
        )()

    def _pointer(self, text: str) -> str:
        """Returns a pointer to an object: its own body, a missing object, or an object that is not a body."""
        own = new_name(UUID(int=self._dice.getrandbits(128)), self._table_id)
        name = self._dice.choice(
            [own, own, own, new_name(UUID(int=0), None), f"{own}/../../instance.json", self._name()]
        )
        if name == own:
            spoilt = text.encode(errors="surrogatepass")
            self._objects.put(own, spoilt if self._dice.random() < 0.9 else b"\xff" + spoilt)
        table_id = self._table_id if self._dice.random() < 0.7 else self._value("table_id")
        about = {"commit_id": f"forged {self._seed} pointer {self._made}", "table_id": table_id}
        return json.dumps({"version": 1, "type": POINTER, **about, "object": name}, separators=(",", ":"))


def _text(request: dict[str, Any]) -> str:
    return json.dumps(request, separators=(",", ":"))


def _containers(place: Any) -> list[Any]:
    values = place.values() if isinstance(place, dict) else place
    return [value for value in values if isinstance(value, dict | list)]


def _repeated(text: str, key: str) -> str:
    return f"{{{key}{text[1:]}"
