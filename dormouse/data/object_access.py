"""Access to the object store's objects for DataFusion and pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.errors import InvalidData, one_line
from dormouse.objects.store import ObjectStore

if TYPE_CHECKING:
    from datafusion import SessionContext


def credentials(store: ObjectStore) -> dict[str, str]:
    """Returns the credentials with which a session reads the store's objects; they may expire."""
    if urlsplit(store.url).scheme != "s3":
        return {}
    from dormouse.objects.s3 import current

    return current(store.options)


def register(ctx: SessionContext, store: ObjectStore) -> None:
    """Registers `store` with a session, which can then read its objects by `store.uri(name)`.

    It does nothing for a store that is a folder.
    """
    parts = urlsplit(store.url)
    if parts.scheme == "s3":
        from datafusion.object_store import AmazonS3

        from dormouse.objects.s3 import s3_options

        options: dict[str, Any] = {"bucket_name": parts.netloc, "allow_http": True} | s3_options(
            store.options
        )
        ctx.register_object_store("s3://", AmazonS3(**options), parts.netloc)


@contextmanager
def parquet_object(
    store: ObjectStore, name: str, *, verify: bool = False, **how: Any
) -> Iterator[pq.ParquetFile]:
    """Opens an object as a Parquet file, and closes it at the end of the block.

    With `verify`, it compares the checksum of each page that has one. `how` is passed to pyarrow, as in
    `open_parquet`. Raises `ObjectNotFound`, or `InvalidData` that names a damaged object.
    """
    try:
        with open_parquet(store, name, verify=verify, **how) as file:
            yield file
    except InvalidData as error:
        raise InvalidData(f"file {name!r}: {error}") from None
    except (pa.ArrowException, KeyError, OSError) as error:
        raise InvalidData(f"file {name!r} cannot be read as Parquet: {one_line(error)}") from error


def open_parquet(store: ObjectStore, name: str, *, verify: bool = False, **how: Any) -> pq.ParquetFile:
    """Opens an object as a Parquet file. A file in a folder is memory-mapped, others are read by ranges.

    With `verify` the file is not mapped, because an unreadable page of a damaged disk would crash the
    process. `how` is passed to pyarrow: `metadata` that was read before, or columns to `read_dictionary`.
    Raises `ObjectNotFound`. The caller closes the file, for example with `with`.
    """
    path = store.local_path(name)
    if path is None:
        return pq.ParquetFile(store.reader(name), pre_buffer=True, page_checksum_verification=verify, **how)
    store.size(name)  # raises ObjectNotFound
    return pq.ParquetFile(path, memory_map=not verify, page_checksum_verification=verify, **how)
