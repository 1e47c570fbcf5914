"""The search for files to load: paths, folders, patterns, URLs and standard input.

Standard input and remote objects are copied to temporary files first.
"""

from __future__ import annotations

import fnmatch
import glob
import ipaddress
import os
import re
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Literal, cast
from urllib.parse import unquote, urlsplit

from dormouse.errors import InvalidData, InvalidName, ObjectStoreError, one_line
from dormouse.model.types import DataType
from dormouse.objects.staging import temporary_folder
from dormouse.objects.store import open_store
from dormouse.sources.text_format import FileFormat, TextOptions, text_format

Kind = Literal["parquet", "csv", "json"]
KINDS: dict[str, Kind] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".tab": "csv", ".psv": "csv",
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
}  # fmt: skip
_PACKED = {".gz", ".zst", ".bz2", ".lz4", ".zip"}
_GLOB = set("*?[")
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*[{\]]|\{\s*[\"}])")
"""The beginning of a JSON object or of an array of objects, with any white space."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
STDIN = "-"
KNOWN = ".parquet, .csv, .tsv or .jsonl"
TIMEOUT_SECONDS = 60
_COPY_BYTES = 1024 * 1024
IsData = Callable[[str, int], bool]
"""A function that returns whether a name is that of a data file.

Its second argument is the number of leading parts of the path that the caller named explicitly.
"""


@dataclass(frozen=True)
class Files:
    """Files to load, with options of their format. Options that are not given are detected.

    - `paths`: one path or several. Each is a file, a folder, a pattern, an `https://` or `s3://` URL, or "-"
      for standard input.
    - `delimiter`, `quote` ("" for none), `escape`, `header` (whether there is one), `skip_lines` (the number
      of lines before it) and `encoding`: the format of CSV files.
    - `null_texts`: the texts that mean null, besides an empty cell.
    - `types`: the types of columns, in place of the inferred ones.
    - `time_formats`: the strptime formats of columns with times.
    - `row_number`: the name of a column of consecutive numbers to add. They begin with `first_row_number`.
    - `kind`: "parquet", "csv" or "json", in place of the kind that the file names imply.
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
    escape: str | None = None
    skip_lines: int | None = None
    kind: Kind | None = None
    formats: Mapping[str, FileFormat] = field(default_factory=dict, repr=False)
    found: Sequence[DataFile] = field(default=(), repr=False)
    is_inferred: bool = field(default=False, repr=False)
    """True if the types of columns that `types` does not name were inferred from the first file."""

    @property
    def said(self) -> TextOptions:
        """The options of the CSV format that the caller gave."""
        nulls = None if self.null_texts is None else [text for text in self.null_texts if text]
        given = {
            "separator": self.delimiter, "quote": self.quote, "escape": self.escape, "header": self.header,
            "skip_lines": self.skip_lines, "null": nulls, "encoding": self.encoding,
        }  # fmt: skip
        return cast(TextOptions, {name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        text_format(**self.said)


@dataclass(frozen=True)
class DataFile:
    """One file to load: its local path, its name in messages, and what is known of its format.

    `folders` has the columns and values of its folder names, like `month=3`. `staged` owns a temporary copy.
    """

    path: Path
    name: str
    kind: Kind
    given: Files
    folders: tuple[tuple[str, str | None], ...] = ()
    format: FileFormat | None = None
    group_rows: tuple[int, ...] = ()
    group_bytes: tuple[int, ...] | None = None
    staged: object = field(default=None, compare=False, repr=False)


def listed_paths(data: Any) -> list[str]:
    """Returns the given paths as texts."""
    paths = data.paths if isinstance(data, Files) else data
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def find_files(data: Any) -> list[DataFile]:
    """Returns the files that paths, folders, patterns and URLs name, in order.

    Downloads remote files and standard input; the copies are deleted when they are no longer used. Raises
    `InvalidData` for a path that names no file.
    """
    given = data if isinstance(data, Files) else Files(data)
    if given.found:
        return [replace(file, given=replace(given, found=())) for file in given.found]
    return [file for text in listed_paths(given) for file in _files_of(text, given)]


def _files_of(text: str, given: Files) -> Iterator[DataFile]:
    if text == STDIN or "://" in text:
        for path, name, keeper in staged(text, _is_name_of_data):
            kind = given.kind or kind_of(path) or _kind_by_content(path, name)
            folders = _folder_columns(name) if name.startswith("s3://") else ()
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
            raise InvalidData(f"file {text!r} does not have a known suffix ({KNOWN})")
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
            yield DataFile(one.absolute(), str(one), each, given, _folder_columns(below))


def kind_of(path: Path) -> Kind | None:
    """Returns the kind of a file by its name, with or without a compression suffix; None if unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
        return None if not suffixes or KINDS.get(suffixes[-1]) == "parquet" else KINDS.get(suffixes[-1])
    return KINDS.get(suffixes[-1]) if suffixes else None


def _kind_by_content(path: Path, name: str) -> Kind:
    """Returns the kind of a file by its first bytes, for names without a known suffix."""
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
    """Returns whether a name is that of a data file. Ignores the first `above` parts of the path.

    Names that begin with a dot or an underscore are metadata of other tools.
    """
    path = Path(name)
    return kind_of(path) is not None and not any(part[0] in "._" for part in path.parts[above:])


def _folder_columns(name: str) -> tuple[tuple[str, str | None], ...]:
    """Returns the columns and values in the folder names of a file, in Hive's form (`month=3`)."""
    folders = [part.partition("=") for part in Path(name).parts[:-1] if "=" in part]
    return tuple(
        (unquote(column), None if value == _NO_VALUE else unquote(value)) for column, _, value in folders
    )


class Staged:
    """A temporary folder that is deleted with the last reference to this object."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp("-copy", dir=temporary_folder()))
        weakref.finalize(self, shutil.rmtree, str(self.folder), ignore_errors=True)

    def __reduce__(self) -> Any:
        # only the process that made the folder deletes it
        return type(None), ()


def staged(text: str, is_data: IsData) -> Iterator[tuple[Path, str, Staged]]:
    """Yields local copies of standard input ("-") or of a URL: the path, the name, and the owner of the copy.

    From a folder or pattern in S3, copies only the objects whose names `is_data` accepts.
    """
    scheme = urlsplit(text).scheme.lower()
    if text == "-":
        keeper = Staged()
        path = keeper.folder / "stdin"
        with path.open("wb") as target:
            shutil.copyfileobj(sys.stdin.buffer, target, _COPY_BYTES)
        yield path, "standard input", keeper
    elif scheme == "file":
        yield Path(unquote(urlsplit(text).path)), unquote(urlsplit(text).path), Staged()
    elif scheme == "s3":
        yield from _objects(text, is_data)
    elif scheme in {"https", "http"}:
        yield _downloaded(text)
    else:
        raise InvalidData(f"{text!r}: give a path, - for standard input, or a URL of https:// or s3://")


def _objects(url: str, is_data: IsData) -> Iterator[tuple[Path, str, Staged]]:
    """Yields copies of one object, of the objects that match a pattern, or of the objects in a folder."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    pattern = next((number for number, sign in enumerate(key) if sign in _GLOB), None)
    prefix = (key if pattern is None else key[:pattern]).rpartition("/")[0]
    try:
        store = open_store(f"s3://{bucket}")
        if pattern is None and is_data(key, len(Path(key).parts)):
            names = [key]
        else:
            folder = prefix if pattern is not None else key.rstrip("/")
            found = [name for name, _ in store.list(folder)]
            names = sorted(
                name
                for name in found
                if is_data(name, len(Path(folder).parts))
                and (pattern is None or _is_like(name.split("/"), key.split("/")))
            )
        if not names:
            raise InvalidData(f"{url!r} names no objects that are .parquet, .csv, .tsv or .jsonl")
        for name in names:
            keeper = Staged()
            path = keeper.folder / Path(name).name
            with store.reader(name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            yield path, f"s3://{bucket}/{name}", keeper
    except (ObjectStoreError, InvalidName) as error:
        raise InvalidData(f"{url!r} cannot be read: {one_line(error)}") from None


def _is_like(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Returns whether the parts of a path match a pattern: `*` within a part, `**` any number of parts."""
    if not wanted or not parts:
        return not parts and all(part == "**" for part in wanted)
    if wanted[0] == "**":
        return _is_like(parts, wanted[1:]) or _is_like(parts[1:], wanted)
    return fnmatch.fnmatchcase(parts[0], wanted[0]) and _is_like(parts[1:], wanted[1:])


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects from public to private addresses (SSRF) and from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https" and urlsplit(req.full_url).scheme == "https":
            raise InvalidData(f"{req.full_url!r} redirects to {newurl!r}, which is not https://")
        if is_private(newurl) and not is_private(req.full_url):
            raise InvalidData(f"{req.full_url!r} redirects to {newurl!r}, which is a private address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_private(url: str) -> bool:
    """Returns whether any address of a URL's host is not public. False if the host does not resolve."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_global for one in found)


def _downloaded(url: str) -> tuple[Path, str, Staged]:
    keeper = Staged()
    name = Path(unquote(urlsplit(url).path)).name or "download"
    path = keeper.folder / name
    request = urllib.request.Request(url, headers={"User-Agent": "dormouse"})  # noqa: S310  # checked above
    try:
        opener = urllib.request.build_opener(_Redirects)
        with opener.open(request, timeout=TIMEOUT_SECONDS) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            expected = source.headers.get("Content-Length")
    except urllib.error.HTTPError as error:
        raise InvalidData(f"{url!r} cannot be read: the server says {error.code} {error.reason}") from None
    except (OSError, ValueError, HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise InvalidData(f"{url!r} cannot be read: {one_line(Exception(str(why)))}") from None
    if expected is not None and int(expected) != path.stat().st_size:
        raise InvalidData(f"{url!r} broke off after {path.stat().st_size:,} of {int(expected):,} bytes")
    return path, url, keeper
