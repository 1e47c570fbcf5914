"""The files of FILE cells. A cell contains a reference to an object of its table, with size and digest."""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from dormouse.errors import InvalidInput, InvalidName, ObjectDamaged, ObjectNotFound, RowNotFound
from dormouse.objects.fault import SHA256, WrittenObject, compared, digest_of_file, new_digest
from dormouse.objects.staging import whole_file
from dormouse.objects.store import ObjectStore
from dormouse.rows.columns import FILE_REFERENCE
from dormouse.state.files.write_streams import PutFiles

CHUNK_BYTES = 1 << 20
NAME_CHARACTERS_MAX = 255
_REFERENCE = re.compile(FILE_REFERENCE)


@dataclass(frozen=True, slots=True)
class CellFile:
    """The file to which a FILE cell refers. `name` is the original name of the file."""

    object_name: str
    byte_count: int
    sha256: str
    name: str


class CellFiles:
    """The files of one table.

    They are kept until the table is dropped, because older versions of rows need them.
    """

    def __init__(self, objects: ObjectStore, put_files: PutFiles, table: str) -> None:
        self._objects = objects
        self._put_files = put_files
        self._prefix = put_files.prefix
        self._table = table

    @contextmanager
    def receiving(self, name: str) -> Iterator[tuple[Path, list[str]]]:
        """Yields a path and an empty list. The caller writes a file to the path within the block.

        At the end of the block, the file is put into the table, and the reference to it is added to the list.
        Raises `InvalidName`.
        """
        if not _REFERENCE.fullmatch(f"file:{'0' * 32}:0:{'0' * 64}:{name}"):
            most = NAME_CHARACTERS_MAX
            raise InvalidName(f"a file's name is 1 to {most} characters, no . first and no /, not {name!r}")
        file_id, given = uuid.uuid4().hex, list[str]()
        with self._objects.staged(self._prefix + file_id) as path:
            yield path, given
            digest, size = digest_of_file(path, SHA256).hex(), path.stat().st_size
        # recorded before a caller gets the reference, so that checks and backups miss no file of a cell
        self._put_files.note(file_id, size, digest)
        given.append(f"file:{file_id}:{size}:{digest}:{name}")

    def of_cell(self, cell: object, where: str) -> CellFile:
        """Returns the file to which a cell refers. `where` names the cell in error messages.

        Raises `RowNotFound` if the cell is empty, if it refers to no file of this table, or if the file is
        lost.
        """
        if cell is None:
            raise RowNotFound(f"table {self._table!r}: {where} has no file")
        match = _REFERENCE.fullmatch(str(cell))
        if match is None:
            raise RowNotFound(
                f"table {self._table!r}: {where} refers to no file that was put here: {cell!r}"[:400]
            )
        file_id, size, digest, name = match.groups()
        file = CellFile(self._prefix + file_id, int(size), digest, name)
        try:
            self._objects.size(file.object_name)
        except ObjectNotFound:
            raise RowNotFound(
                f"table {self._table!r}: the file in {where} is lost: object {file.object_name!r} does not "
                "exist; 'dormouse restore' brings it back from a backup"
            ) from None
        return file

    def lacking(self, cells: Sequence[str]) -> list[str]:
        """Returns the cells that do not refer to a file that was put into the table."""
        parts = {cell: match.groups() for cell in cells if (match := _REFERENCE.fullmatch(cell))}
        noted = self._put_files.of_ids({file_id for file_id, *_ in parts.values()}) if parts else {}
        return [cell for cell in cells if cell not in parts or not self._is_put(parts[cell], noted)]

    def _is_put(self, parts: Sequence[str], noted: Mapping[str, tuple[int, str]]) -> bool:
        file_id, size, digest, _ = parts
        if (put := noted.get(file_id)) is not None:
            return put == (int(size), digest)
        try:  # earlier releases did not record files
            return self._objects.size(self._prefix + file_id) == int(size)
        except ObjectNotFound:
            return False

    def chunks(self, file: CellFile, start: int = 0, end: int | None = None) -> Generator[bytes]:
        """Yields the bytes of a file from `start` to before `end`, by default all.

        Always reads the whole file, to compare its digest. Yields the last bytes only after the comparison,
        so that the bytes of a damaged file are never complete. Raises `ObjectNotFound`, and `ObjectDamaged`
        before the last bytes if the file is not the file that was put.
        """
        end = file.byte_count if end is None else end
        if start >= end and file.byte_count:
            return
        digest, size, held = new_digest(SHA256), 0, b""
        with self._objects.reader(file.object_name) as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                wanted = chunk[max(0, start - size) : max(0, end - size)]
                size += len(chunk)
                if held and wanted and size <= file.byte_count:
                    yield held
                held = wanted or held
        written = WrittenObject(file.object_name, file.byte_count, bytes.fromhex(file.sha256))
        if fault := compared(written, size, digest.digest()):
            raise ObjectDamaged.from_message(
                f"table {self._table!r}: object {file.object_name!r} is not the file that was put there: it "
                f"{fault}"
            )
        if held:
            yield held


def put(files: CellFiles, path: str | PathLike[str], name: str | None) -> str:
    """Copies a local file into the table, and returns the reference to it."""
    source = Path(fspath(path))
    with files.receiving(name or source.name) as (target, given):
        try:
            with source.open("rb") as read, target.open("wb") as written:
                while chunk := read.read(CHUNK_BYTES):
                    written.write(chunk)
        except FileNotFoundError as error:
            raise InvalidInput(f"cannot read {str(source)!r}: {error.strerror}") from None
    return given[0]


def save(chunks: Iterator[bytes], path: str | PathLike[str]) -> Path:
    """Writes chunks to a local file, and returns its path. A failure leaves no file."""
    with whole_file(path) as file:
        file.writelines(chunks)
    return Path(fspath(path))
