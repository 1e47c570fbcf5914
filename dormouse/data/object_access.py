"""How DataFusion and pyarrow reach the object store's objects."""

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
    """What `register` would give a session to reach the store with, which may expire."""
    if urlsplit(store.url).scheme != "s3":
        return {}
    from dormouse.objects.s3 import current

    return current(store.options)


def register(ctx: SessionContext, store: ObjectStore) -> None:
    """Let `ctx` read the objects of `store` under their `store.uri(name)`; a folder needs nothing."""
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
    """An object as a Parquet file; `ObjectNotFound`, or `InvalidData` that names it when it is damaged.

    `verify`: pages that have a checksum are verified by it. `how` is pyarrow's, as for `open_parquet`.
    """
    try:
        with open_parquet(store, name, verify=verify, **how) as file:
            yield file
    except InvalidData as error:
        raise InvalidData(f"file {name!r}: {error}") from None
    except (pa.ArrowException, KeyError, OSError) as error:
        raise InvalidData(f"file {name!r} cannot be read as Parquet: {one_line(error)}") from error


def open_parquet(store: ObjectStore, name: str, *, verify: bool = False, **how: Any) -> pq.ParquetFile:
    """Open an object as a Parquet file: mapped from a folder, else read in the ranges that are asked for.

    `verify`: not mapped, as a page of a damaged disk would end the process. `how` is pyarrow's: `metadata`
    that was read before, columns to `read_dictionary` as they are. Raises `ObjectNotFound`; close it, or use
    it in a `with`.
    """
    path = store.local_path(name)
    if path is None:
        return pq.ParquetFile(store.reader(name), pre_buffer=True, page_checksum_verification=verify, **how)
    store.size(name)  # says ObjectNotFound
    return pq.ParquetFile(path, memory_map=not verify, page_checksum_verification=verify, **how)
