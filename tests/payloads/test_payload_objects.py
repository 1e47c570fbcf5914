"""Objects of payloads. Packed payloads can be read back, and damage is detected."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.payloads.copying import GAIN_MIN, trained
from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.pack import (
    Damaged,
    Entry,
    Index,
    Packed,
    Packer,
    Row,
    decompressor,
    index_start,
    unpacked,
)
from dormouse.payloads.reading import JOIN_BYTES_MAX, JOIN_GAP_BYTES, Pointer, _joined

DAY = date(2026, 3, 5)
AT = datetime(2026, 3, 5, 12, 0, 0, 1, tzinfo=UTC)
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=20)


def packed(rows: list[Row], dictionary: bytes = b"") -> Packed:
    packer = Packer(DAY, {"k": dictionary} if dictionary else {})
    by_kind: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key.place):
        by_kind.setdefault(row.key.kind, []).append(row)
    for some in by_kind.values():
        packer.add(some)
    return packer.finish()


@given(
    st.dictionaries(
        st.tuples(TEXT, TEXT, st.sampled_from("kl")), st.binary(max_size=200), min_size=1, max_size=20
    )
)
def test_an_object_is_read_without_the_database(contents: dict[tuple[str, str, str], bytes]) -> None:
    rows = [Row(PayloadKey(tenant, id_, AT, kind), data) for (tenant, id_, kind), data in contents.items()]
    made = packed(rows)
    index = Index(made.data[index_start(made.data) :])
    assert (index.day, index_start(made.data)) == (DAY, made.index_start)
    assert list(index) == made.entries
    for row in rows:
        entry = index.find(row.key)
        assert entry is not None
        frame = made.data[entry.start : entry.start + entry.length]
        assert unpacked(frame, entry, decompressor(None)) == row.content
    assert index.find(PayloadKey("nobody", "x", AT, "zz")) is None
    assert index.find(rows[0].key._replace(inserted_at=AT + timedelta(microseconds=1))) is None


ROWS = [Row(PayloadKey("t", f"{n:03d}", AT, "k"), json.dumps({"n": n}).encode()) for n in range(20)]


@pytest.mark.parametrize("at", range(0, 1_000, 7))
def test_a_changed_byte_of_a_frame_or_the_index_is_detected(at: int) -> None:
    made = packed(ROWS)
    at %= len(made.data)
    data = made.data[:at] + bytes([made.data[at] ^ 4]) + made.data[at + 1 :]
    reported = 0
    try:
        index = Index(data[index_start(data) :])
    except Damaged:
        reported += 1
    else:
        assert list(index) == made.entries
    for entry, row in zip(made.entries, ROWS, strict=True):
        try:
            assert (
                unpacked(data[entry.start : entry.start + entry.length], entry, decompressor(None))
                == row.content
            )
        except Damaged:
            reported += 1
    assert reported == (1 if at >= 8 else 0)  # except the magic at the beginning


@pytest.mark.parametrize("kept", [0, 1, 8, 23, 24, 25, 100, -1])
def test_a_truncated_object_is_detected(kept: int) -> None:
    data = packed(ROWS).data[:kept]
    with pytest.raises(Damaged):
        Index(data[max(0, index_start(data)) :])


def test_a_frame_of_another_payload_is_detected() -> None:
    made = packed(ROWS)
    first, second = made.entries[:2]
    frame = made.data[second.start : second.start + second.length]
    with pytest.raises(Damaged, match='another payload there: \\["t", "001"'):
        unpacked(frame, second._replace(key=first.key), decompressor(None))
    with pytest.raises(Damaged, match="its checksum differs"):
        unpacked(frame, second._replace(checksum=first.checksum), decompressor(None))
    with pytest.raises(Damaged, match="bytes, and was written with"):
        unpacked(frame[:-1], second, decompressor(None))
    with pytest.raises(Damaged, match="cannot be decompressed"):
        unpacked(b"x" * second.length, second, decompressor(None))


def test_a_dictionary_is_used_if_it_saves_enough() -> None:
    alike = [
        json.dumps({"customer": f"c{n}", "state": "delivered", "way": "by road", "n": n * n}).encode()
        for n in range(20_000)
    ]
    dictionary = trained(alike, 16 * 2**20)
    assert dictionary
    rows = [Row(PayloadKey("t", f"{n:06d}", AT, "k"), text) for n, text in enumerate(alike[:2_000])]
    without, with_it = packed(rows), packed(rows, dictionary)
    frames = [made.index_start - made.entries[0].start for made in (without, with_it)]
    assert frames[1] < (1 - GAIN_MIN) * frames[0]
    start, length, _ = with_it.dictionaries["k"]
    entry = with_it.entries[7]
    by = decompressor(with_it.data[start : start + length])
    assert unpacked(with_it.data[entry.start : entry.start + entry.length], entry, by) == alike[7]
    chance = [bytes((n * m) % 251 for m in range(500)) + n.to_bytes(8, "big") * 50 for n in range(100)]
    assert trained(chance, 16 * 2**20) == b""  # too few samples
    assert trained([], 1) == b""


def test_ranges_that_lie_close_together_are_one_request() -> None:
    def pointer(start: int, length: int) -> Pointer:
        return Pointer("o", Entry(PayloadKey("t", str(start), AT, "k"), start, length, b""), {})

    near, far = pointer(10, 5), pointer(15 + JOIN_GAP_BYTES, 5)
    apart = pointer(21 + 2 * JOIN_GAP_BYTES, 5)
    assert list(_joined([near, far, apart])) == [[near, far], [apart]]
    large = [pointer(n * JOIN_BYTES_MAX // 2, JOIN_BYTES_MAX // 2) for n in range(4)]
    assert list(map(len, _joined(large))) == [2, 2]
