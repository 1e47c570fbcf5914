"""Messages that wait in a queue during an upgrade: the new version reads those of earlier versions."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import pytest

from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.state.commits.requests import AssignJobIds, SplitFileReferences, SplitPartition, decode
from tests.support.commits import (
    AddFiles,
    CommitRequest,
    DeleteCollectedFiles,
    EditTables,
    Envelope,
    ReplaceFileReferences,
    TableEdit,
    encode,
)
from tests.support.state import KeyBounds, NewDeletion, Read, RowsContent

NAMED = {"commit_id": 'c "1" 𝔻', "table": "t"}
PART = FileReference(
    filename="data/f é.parquet",
    partition_id="0-1",
    row_count=7,
    job_id="j",
    last_updated=datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
    count_approximate=True,
    only_contains_data_for_this_partition=False,
)
FULL = FileWithReferences(
    filename="data/f é.parquet",
    references=(PART, FileReference(filename="data/f é.parquet", partition_id="0-2", row_count=0)),
    byte_count=9,
    row_count=14,
    min_key=b"\0\xff",
    max_key=b"",
    last_updated=datetime(2026, 1, 31, 12, tzinfo=timezone(-timedelta(hours=9, minutes=30))),
    digest=b"\0\xff" * 8,
)
REPLACEMENTS = (
    ReplaceFileReferencesRequest(
        job_id="j",
        partition_id="0-1",
        input_filenames=("a", "b"),
        new_reference=FileReference(filename="new", partition_id="0-1", row_count=5),
        new_file=FileWithReferences(filename="new", byte_count=3, min_key=b"a", max_key=b"b"),
    ),
    ReplaceFileReferencesRequest(job_id="k", partition_id="0-2", input_filenames=("c",), new_reference=None),
)

FIRST_TOGETHER = """
import os, sys, threading
from dormouse.state.commits.requests import decode, encode

def read(start):
    start.wait()
    encode(decode(sys.argv[1]).request)

codes = []
for _ in range(25):
    if child := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    sys.setswitchinterval(1e-6)
    start = threading.Barrier(4)
    threads = [threading.Thread(target=read, args=(start,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)
print(*codes)
"""
"""A program that forks 25 processes; in each, four threads read its first message at the same time."""


@pytest.mark.slow
def test_threads_may_read_a_process_s_first_messages_at_once() -> None:
    """A committer's threads decode messages at once. This once crashed more than 1 in 4 processes."""
    message = encode(ReplaceFileReferences(**NAMED, requests=REPLACEMENTS))
    command = [sys.executable, "-c", FIRST_TOGETHER, message]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0"] * 25


@pytest.mark.parametrize(
    ("text", "request_", "table_id"),
    [
        (
            r'{"version":1,"type":"add_files","commit_id":"c \"1\" \ud835\udd3b","table":"t",'
            r'"table_id":7,"files":[{"filename":"data/f \u00e9.parquet",'
            r'"references":[{"partition_id":"0-1","row_count":7,"job_id":"j",'
            r'"last_updated":"2026-01-31T12:00:00.123456+00:00","count_approximate":true,'
            r'"only_contains_data_for_this_partition":false},{"partition_id":"0-2","row_count":0}],'
            r'"byte_count":9,"row_count":14,"min_key":"AP8=","max_key":"",'
            r'"last_updated":"2026-01-31T12:00:00-09:30","digest":"AP8A/wD/AP8A/wD/AP8A/w=="},{"filename":"bare"}]}',
            AddFiles(**NAMED, files=(FULL, FileWithReferences(filename="bare"))),
            7,
        ),
        (
            r'{"version":1,"type":"add_files","commit_id":"c \"1\" \ud835\udd3b","table":"t",'
            r'"table_id":null,"attempt_id":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a",'
            r'"files":[{"filename":"bare"}]}',
            AddFiles(**NAMED, files=(FileWithReferences(filename="bare"),), attempt_id="0a" * 16),
            None,
        ),
        (
            r'{"version":1,"type":"assign_job_ids","commit_id":"c \"1\" \ud835\udd3b","table":"t",'
            r'"table_id":7,"requests":[{"job_id":"j","partition_id":"0-1","filenames":["a","b"]}]}',
            AssignJobIds(
                **NAMED, requests=(AssignJobIdRequest(job_id="j", partition_id="0-1", filenames=("a", "b")),)
            ),
            7,
        ),
        (
            r'{"version":1,"type":"replace_file_references","commit_id":"c \"1\" \ud835\udd3b",'
            r'"table":"t","table_id":7,"attempt_id":"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b",'
            r'"requests":[{"job_id":"j","partition_id":"0-1","input_filenames":["a","b"],'
            r'"new_reference":{"filename":"new","partition_id":"0-1","row_count":5},'
            r'"new_file":{"filename":"new","byte_count":3,"min_key":"YQ==","max_key":"Yg=="}},'
            r'{"job_id":"k","partition_id":"0-2","input_filenames":["c"]}]}',
            ReplaceFileReferences(**NAMED, requests=REPLACEMENTS, attempt_id="0b" * 16),
            7,
        ),
        (
            r'{"version":1,"type":"split_file_references","commit_id":"c \"1\" \ud835\udd3b",'
            r'"table":"t","table_id":7,'
            r'"requests":[{"old_reference":{"filename":"data/f \u00e9.parquet","partition_id":"0-1",'
            r'"row_count":7,"job_id":"j","last_updated":"2026-01-31T12:00:00.123456+00:00",'
            r'"count_approximate":true,"only_contains_data_for_this_partition":false},'
            r'"new_references":[{"partition_id":"0-3","row_count":3,"count_approximate":true,'
            r'"only_contains_data_for_this_partition":false},{"partition_id":"0-4","row_count":4,'
            r'"count_approximate":true,"only_contains_data_for_this_partition":false}]}]}',
            SplitFileReferences(
                **NAMED, requests=(SplitFileReferenceRequest.split_to_children(PART, "0-3", "0-4"),)
            ),
            7,
        ),
        (
            r'{"version":1,"type":"delete_collected_files","commit_id":"c \"1\" \ud835\udd3b",'
            r'"table":"t","table_id":7,"filenames":["a","b"]}',
            DeleteCollectedFiles(**NAMED, filenames=("a", "b")),
            7,
        ),
        (
            r'{"version":1,"type":"split_partition","commit_id":"c \"1\" \ud835\udd3b","table":"t",'
            r'"table_id":7,"partition_id":"root","point":{"int":-7}}',
            SplitPartition(**NAMED, partition_id="root", point=-7),
            7,
        ),
        (
            r'{"version":1,"type":"split_partition","commit_id":"c \"1\" \ud835\udd3b","table":"t",'
            r'"table_id":7,"partition_id":"root","point":{"str":"\u00e9"},"field":"carrier"}',
            SplitPartition(**NAMED, partition_id="root", point="é", field="carrier"),
            7,
        ),
        (
            r'{"version":1,"type":"split_partition","commit_id":"c \"1\" \ud835\udd3b","table":"t",'
            r'"table_id":null,"partition_id":"root","point":{"bytes":"AGE="}}',
            SplitPartition(**NAMED, partition_id="root", point=b"\0a"),
            None,
        ),
    ],
)
def test_messages_of_before_msgspec_are_still_read(
    text: str, request_: CommitRequest, table_id: int | None
) -> None:
    """New messages are the same JSON, except for the order of keys, "Z", and fields with defaults."""
    assert decode(text) == decode(text.encode()) == Envelope(request_, table_id)
    written = json.loads(encode(request_, table_id=table_id).replace('Z"', '+00:00"'))
    assert {"table_id": None, **written} == json.loads(text)


def test_edits_of_this_version_will_be_read() -> None:
    text = (
        '{"type":"edit_tables","version":1,"commit_id":"c","table":"t","table_id":7,'
        '"table_uuid":"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b","parts":[{"table":"t","table_id":7,'
        '"table_uuid":"0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b","schema_version":2,"files":[{"filename":"bare"}],'
        '"deletions":[{"condition":"{\\"k\\": 1}","bounds":[["YQ==",null],["Yg==",null]],"by_values":true,'
        '"rows":{"name":"t/rows","content":"YQ=="}}],'
        '"reads":[{"snapshot":"3:9:4,8","spans":[["YQ==",""]],"are_keys":true}],'
        '"attempt_ids":["0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"]},{"table":"u"}]}'
    )
    part = TableEdit(
        table="t",
        table_id=7,
        table_uuid="0b" * 16,
        schema_version=2,
        files=(FileWithReferences(filename="bare"),),
        deletions=(
            NewDeletion(
                '{"k": 1}',
                KeyBounds([b"a", None], [b"b", None]),
                by_values=True,
                rows=RowsContent("t/rows", b"a"),
            ),
        ),
        reads=(Read("3:9:4,8", [(b"a", b"")], are_keys=True),),
        attempt_ids=("0a" * 16,),
    )
    request = EditTables(commit_id="c", parts=(part, TableEdit(table="u")))
    assert decode(text) == Envelope(request, 7, "0b" * 16)
    assert encode(request) == text
