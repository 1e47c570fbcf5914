"""Places in files of JSON: the line of each value, and the first thing that is no object."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dormouse.errors import InvalidData
from dormouse.model.types import DataType, Field
from dormouse.sources.data_files import DataFile
from dormouse.sources.text_format import opened

_EMPTY = re.compile(r"\s*(\[\s*\]\s*)?")
_EMPTY_BYTES_MAX = 1 << 16
_WHOLE_CHARACTERS_MAX = 1 << 28
"""Of a file whose values go over lines: it is parsed as a whole."""
_BETWEEN = re.compile(r"[\s,\[\]]*")
JSON_DEPTH_MAX = 100
"""DuckDB, and Python, recurse once a level, and end the process, or raise, at some thousands."""
_DEPTH_BYTES = 1 << 20
_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_NO_UTF8 = re.compile("[\udc80-\udcff]")
_SHOWN = 100
_NAMES = {
    str: "a text",
    bool: "a truth",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def is_empty(file: DataFile) -> bool:
    """Returns whether a file of text has no rows: it is empty, or of JSON an array without objects."""
    if file.kind == "parquet":
        return False
    with opened(file.path) as stream:
        begin = bytes(stream.read(_EMPTY_BYTES_MAX + 1))
    text = begin.decode("utf-8-sig", errors="replace")
    if len(begin) > _EMPTY_BYTES_MAX:
        return False
    return not text.strip() if file.kind == "csv" else _EMPTY.fullmatch(text) is not None


def check_depth(path: Path) -> None:
    """Raises `InvalidData` for a file that nests more than `JSON_DEPTH_MAX` deep."""
    depth, line, is_text, rest = 0, 1, False, b""
    with opened(path) as stream:
        while block := bytes(stream.read(_DEPTH_BYTES)):
            data = rest + block
            slashes = len(data) - len(data.rstrip(b"\\"))
            data, rest = (data[:-1], data[-1:]) if slashes % 2 else (data, b"")
            codes = np.frombuffer(_ESCAPED.sub(b"..", data), np.uint8)
            if not len(codes):
                continue
            in_text = (np.cumsum(codes == ord('"'), dtype=np.int32) + is_text) % 2 == 1
            folded = codes | 32  # [ and ] become { and }
            steps = (folded == ord("{")).astype(np.int8) - (folded == ord("}"))
            depths = depth + np.cumsum(np.where(in_text, 0, steps), dtype=np.int32)
            if depths.max() > JSON_DEPTH_MAX:
                line += data.count(b"\n", 0, int(np.argmax(depths > JSON_DEPTH_MAX)))
                raise InvalidData(f"line {line:,}: nests more than {JSON_DEPTH_MAX} deep", line=line)
            depth, is_text, line = int(depths[-1]), bool(in_text[-1]), line + data.count(b"\n")


def line_of_object(path: Path, number: int) -> int | None:
    """Returns the line, from 1, that an object begins on, by its number from 0; None if it is not found."""
    try:
        return next((line for line, _ in islice(_values(path), number, None)), None)
    except InvalidData:
        return None


def check_objects(path: Path, fields: tuple[Field, ...] = ()) -> bool:
    """Returns whether some object has a key; it is slow, for a file that DuckDB refuses.

    Raises `InvalidData` for the first thing that is no object, or no list or object where a field is one.
    """
    has_keys = False
    for line, value in _values(path):
        if not isinstance(value, _Object):
            said = f"line {line:,}: is {_named(value)}; each line, or each element, is an object"
            raise InvalidData(said, line=line)
        if value.doubled is not None:
            raise InvalidData(f"line {line:,}: has {value.doubled!r} twice", line=line)
        has_keys = has_keys or bool(value)
        for field in fields:
            if (wrong := _misshapen(value.get(field.name), field.type)) is not None:
                raise InvalidData(
                    f"line {line:,}: column {field.name!r} is {field.type}, and has {_named(wrong)} there",
                    line=line,
                    column=field.name,
                )
    return has_keys


class _Object(dict[str, Any]):
    """An object, and a key that it has twice."""

    doubled: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found.doubled = next(name for name in names if names.count(name) > 1)
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_object)


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields each value with its line; `InvalidData` for what is no JSON."""
    with opened(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape")
        before, first = 0, ""
        for first in text:
            before += 1
            if first.strip():
                break
        if first.lstrip().startswith("[") or not _is_whole(first):
            whole = first + text.read(_WHOLE_CHARACTERS_MAX)
            yield from _of_text(whole, before, is_cut=bool(text.read(1)))
            return
        yield from _of_text(first, before)
        for line, one in enumerate(text, before + 1):
            yield from _of_text(one, line)


def _is_whole(text: str) -> bool:
    try:
        _decoder.raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.pos < len(text.strip())  # broken in its middle
    return True


def _of_text(text: str, first_line: int, *, is_cut: bool = False) -> Iterator[tuple[int, Any]]:
    """Yields the values of a text, in an array or one after the other; `first_line` is its first.

    Of a text that is cut, those before the first that is not whole.
    """
    at, line, counted = 0, first_line, 0
    while (at := _after(text, at)) < len(text):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = _decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if is_cut:
                return
            there = line + text.count("\n", at, error.pos)
            said = f"line {there:,}: is no JSON: {error.msg} {_seen(text, error.pos)}"
            raise InvalidData(said, line=there) from None
        except RecursionError:
            raise InvalidData(f"line {line:,}: is nested too deeply", line=line) from None
        if (wrong := _NO_UTF8.search(text, at, end)) is not None:
            there = line + text.count("\n", at, wrong.start())
            raise InvalidData(f"line {there:,}: is not UTF-8", line=there)
        yield line, value
        at = end


def _after(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _seen(text: str, at: int) -> str:
    rest = text[at:].split("\n", 1)[0][:20].rstrip()
    return f"at {rest!r}" if rest else "at its end"


def _named(value: Any) -> str:
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False)
    return f"{_NAMES.get(type(value), 'an object')} ({text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'})"


def _misshapen(value: Any, kind: DataType) -> Any:
    """Returns a part that is no list or object where the type has one; None if there is none."""
    if value is None or not kind.is_nested:
        return None
    if kind.element is not None:
        if not isinstance(value, list):
            return value
        return next((wrong for one in value if (wrong := _misshapen(one, kind.element)) is not None), None)
    if not isinstance(value, dict):
        return value
    parts = (_misshapen(value.get(part.name), part.type) for part in kind.parts)
    return next((wrong for wrong in parts if wrong is not None), None)
