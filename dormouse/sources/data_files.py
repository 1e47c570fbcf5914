"""Files of rows, as they are given: paths, folders, patterns, URLs and standard input."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from dormouse.errors import InvalidData, InvalidInput, one_line
from dormouse.model.types import DataType
from dormouse.sources.text_format import TextFormat

Kind = Literal["parquet", "csv", "json"]
KINDS: dict[str, Kind] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".tab": "csv", ".psv": "csv",
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
}  # fmt: skip
_PACKED = {".gz", ".zst", ".bz2", ".lz4", ".zip"}
_GLOB = set("*?[")
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*[{\]]|\{\s*[\"}])")
"""An object, or an array of objects, however it is laid out."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
STDIN = "-"
KNOWN = ".parquet, .csv, .tsv or .jsonl"


@dataclass(frozen=True)
class Files:
    """Files to be read, and what is known of how they are written; what is not said is found out.

    `paths` are one or several: of files, folders, patterns, `https://` and `s3://` URLs, or "-" for standard
    input. Of text: its `delimiter`, `quote` ("" for none), whether it has a `header`, its `encoding`, and the
    `null_texts` beside nothing at all. `types` are those of columns whose inferred ones are not meant, and
    `time_formats` those of their times, as of strptime. `row_number` is a column of running numbers to add.
    """

    paths: Any
    delimiter: str | None = None
    quote: str | None = None
    header: bool | None = None
    encoding: str | None = None
    null_texts: Sequence[str] | None = None
    types: Mapping[str, DataType] = field(default_factory=dict)
    time_formats: Mapping[str, str] = field(default_factory=dict)
    row_number: str | None = None
    first_row_number: int = 0
    kind: Kind | None = None
    formats: Mapping[str, TextFormat] = field(default_factory=dict, repr=False)
    found: Sequence[DataFile] = field(default=(), repr=False)
    is_inferred: bool = field(default=False, repr=False)
    """Whether the types of columns, but for `types`, were inferred of the first file."""

    @property
    def says_format(self) -> bool:
        """Whether anything is said of how text is written."""
        given = (self.delimiter, self.quote, self.header, self.encoding, self.null_texts)
        return any(one is not None for one in given) or bool(self.time_formats)

    def __post_init__(self) -> None:
        for name, most in (("delimiter", 1), ("quote", 1)):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, str) or len(given.encode()) > most):
                raise InvalidInput(f"{name} must be one character of ASCII, not {given!r}")
        if self.delimiter == "":
            raise InvalidInput("delimiter must be one character of ASCII, not ''")
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except LookupError:
                raise InvalidInput(
                    f"encoding {self.encoding!r} is not known, try latin-1 or utf-16"
                ) from None


@dataclass(frozen=True)
class DataFile:
    """One file, where it is on this machine, and how it is to be read as far as that is known.

    `folders` are the columns that its folders tell, like `month=3`; `staged` keeps a copy while it is used.
    """

    path: Path
    name: str
    kind: Kind
    given: Files
    folders: tuple[tuple[str, str | None], ...] = ()
    format: TextFormat | None = None
    group_rows: tuple[int, ...] = ()
    group_bytes: tuple[int, ...] | None = None
    staged: object = field(default=None, compare=False, repr=False)


def are_paths(data: Any) -> bool:
    """Whether the data is given as the path, or paths, of files."""
    if isinstance(data, Files):
        return True
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str | os.PathLike)


def listed_paths(data: Any) -> list[str]:
    """The paths that are given, as texts."""
    paths = data.paths if isinstance(data, Files) else data
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def find_files(data: Any) -> list[DataFile]:
    """The files that paths, folders, patterns and URLs name, in order; `InvalidData` when one names none.

    What is not on this machine is copied here first, until the last of it is read.
    """
    given = data if isinstance(data, Files) else Files(data)
    if given.found:
        return [replace(file, given=replace(given, found=())) for file in given.found]
    return [file for text in listed_paths(given) for file in _files_of(text, given)]


def _files_of(text: str, given: Files) -> Iterator[DataFile]:
    if text == STDIN or "://" in text:
        from dormouse.sources.remote_files import staged

        for path, name, keeper in staged(text, _is_name_of_data):
            kind = given.kind or kind_of(path) or _kind_by_content(path, name)
            folders = _told_by(name) if name.startswith("s3://") else ()
            yield DataFile(path, name, kind, given, folders, staged=keeper)
        return
    path = Path(text)
    if path.is_dir():
        found = [one for one in sorted(path.rglob("*")) if _is_data(one, path)]
        if not found:
            raise InvalidData(f"folder {text!r} has no {KNOWN} files (of text also .gz, .zst and .zip)")
    elif path.exists():
        known = given.kind or kind_of(path)
        if known is None:
            raise InvalidData(f"file {text!r} is neither {KNOWN} by its name")
        yield DataFile(path.absolute(), str(path), known, given)
        return
    elif not _GLOB & set(text):
        raise InvalidData(f"path {text!r} does not exist")
    else:
        begins = text[: min(text.index(sign) for sign in _GLOB if sign in text)]
        above = Path(f"{begins}_").parent
        found = sorted(p for p in map(Path, glob.glob(text, recursive=True)) if _is_data(p, above))  # noqa: PTH207
        if not found:
            raise InvalidData(f"pattern {text!r} matches no {KNOWN} files (of text also .gz, .zst and .zip)")
        path = Path(begins).parent
        if any("=" in part for part in Path(text).parts):
            path = Path()
    for one in found:
        each = given.kind or kind_of(one)
        if each is not None:
            below = str(one.relative_to(path)) if one.is_relative_to(path) else str(one)
            yield DataFile(one.absolute(), str(one), each, given, _told_by(below))


def kind_of(path: Path) -> Kind | None:
    """By its name, which may end with how it is compressed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
        return None if not suffixes or KINDS.get(suffixes[-1]) == "parquet" else KINDS.get(suffixes[-1])
    return KINDS.get(suffixes[-1]) if suffixes else None


def _kind_by_content(path: Path, name: str) -> Kind:
    """Of what has no name that tells it: Parquet and JSON begin as no CSV does."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise InvalidData(f"file {name!r} cannot be read: {one_line(error)}") from None
    if head.startswith(b"PAR1"):
        return "parquet"
    return "json" if _JSON.match(head) else "csv"


def _is_data(path: Path, below: Path) -> bool:
    return _is_name_of_data(str(path), len(below.parts)) and path.is_file()


def _is_name_of_data(name: str, above: int) -> bool:
    """But for the first parts none begins with a dot or an underscore: others' bookkeeping does."""
    path = Path(name)
    return kind_of(path) is not None and not any(part[0] in "._" for part in path.parts[above:])


def _told_by(name: str) -> tuple[tuple[str, str | None], ...]:
    """The columns and values of the folders that a file is in, as Hive writes them."""
    folders = [part.partition("=") for part in Path(name).parts[:-1] if "=" in part]
    return tuple(
        (unquote(column), None if value == _NO_VALUE else unquote(value)) for column, _, value in folders
    )
