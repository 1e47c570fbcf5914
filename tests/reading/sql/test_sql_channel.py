"""Frames of a worker whose memory a statement has corrupted give an error, and never run code."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from dormouse.errors import EngineFailed, InvalidQuery
from dormouse.model.region import min_value
from dormouse.model.types import KEY_TYPES
from dormouse.reading.sql import worker
from dormouse.reading.sql.firsts import Ends, Enough
from dormouse.reading.sql.joined import Joined
from dormouse.reading.sql.wanted import Wanted
from dormouse.reading.sql.worker import BATCH, SCHEMA, VALUE, failed, plain_value
from dormouse.reading.sql.workers import WorkerLimits, Workers
from tests.support.model import DataType, Range
from tests.support.objects import open_store
from tests.support.reading import Interruption, KeyRanges

GARBAGE = """
import pickle, socket, struct, sys
end = socket.socket(fileno=int(sys.argv[1]))
end.sendall(struct.pack("!cQ", b"E", 0))
for answer in pickle.loads(bytes.fromhex(sys.argv[3])):
    end.sendall(answer)
end.recv(1 << 20)
end.recv(1 << 20)
"""


def _frame(kind: bytes, data: bytes) -> bytes:
    return worker._HEADER.pack(kind, len(data)) + data


class _Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, ("exit 1",)


_STRINGS = pa.schema([("s", pa.string())])
_OFFSETS = pa.py_buffer(pa.array([0, 100, 1], pa.int32()).buffers()[1])
_BAD_OFFSETS = pa.record_batch(
    [pa.Array.from_buffers(pa.string(), 2, [None, _OFFSETS, pa.py_buffer(b"x")])], schema=_STRINGS
)


@pytest.mark.parametrize(
    "frames",
    [
        [_frame(SCHEMA, b"no schema")],
        [_frame(SCHEMA, _STRINGS.serialize()), _frame(BATCH, b"no batch")],
        [_frame(SCHEMA, _STRINGS.serialize()), _frame(BATCH, _BAD_OFFSETS.serialize())],
        [_frame(SCHEMA, _STRINGS.serialize()), worker._HEADER.pack(BATCH, 1 << 33)],
        [_frame(b"?", b"")],
        [_frame(b"F", b"no error")],
        [_frame(b"F", b'["SystemExit", "x"]')],
        [_frame(VALUE, pickle.dumps(_Evil()))],
    ],
)
def test_frames_of_a_corrupted_worker_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: list[bytes]
) -> None:
    def started(end: int, lifeline: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", GARBAGE, str(end), str(lifeline), pickle.dumps(frames).hex()]
        return subprocess.Popen(command, pass_fds=(end, lifeline))

    monkeypatch.setattr("dormouse.reading.sql.workers._started", started)
    with closing(Workers(open_store(tmp_path), WorkerLimits(1)).start()) as workers:
        session = workers.session(Interruption())
        with closing(session), pytest.raises(EngineFailed, match="its answer cannot be read"):
            for _ in session.rows({}, "SELECT 1", ()).batches:
                pass
        assert session._worker.process_id not in workers.process_ids


def test_only_plain_values_are_read() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"system is not expected"):
        plain_value(pa.py_buffer(pickle.dumps(_Evil())))
    assert failed(InvalidQuery("x")) == b'["InvalidQuery", "x"]'


@pytest.mark.parametrize("kind", sorted(KEY_TYPES))
def test_bounds_of_keys_of_every_type_are_read(kind: str) -> None:
    smallest = min_value(DataType(kind))
    ranges = KeyRanges({"k": [Range.exactly(smallest)], "l": [Range(min=smallest)]})
    joined = Joined(("t", "u"), ranges, (("0 k", "1 l"),))
    wanted = Wanted(
        {"t": ranges}, Enough(3, True), False, True, ends=Ends(True, False, (0,)), joined=joined
    )  # fmt: skip
    assert plain_value(pa.py_buffer(pickle.dumps(wanted))) == wanted
