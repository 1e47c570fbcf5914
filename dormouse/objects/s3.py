"""Objects in S3, through obstore."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import S3Store as Client

from dormouse.errors import InvalidInput, InvalidName, ObjectNotFound, ObjectStoreError
from dormouse.objects.names import (
    check_name,
    check_prefix,
    failed,
    missing,
    pinned_name,
    reporting_full_disk,
    taken,
    whole_range,
)
from dormouse.objects.staging import ForkGuard, StagingArea, private_folder, private_folders
from dormouse.settings.process import environment

if TYPE_CHECKING:
    from obstore.store import RetryConfig

# AWS credentials from the same places as AWS's own tools: profiles, SSO, roles of containers and machines.

_OF_READERS = {"region", "access_key_id", "secret_access_key", "session_token", "endpoint"}


def provider(options: Mapping[str, str]) -> dict[str, Any]:
    """Returns the credentials and the region as options of an obstore client; {} if obstore itself must find
    them.
    """
    credentials = _found(options)
    if credentials is None:
        return {}
    return {"credential_provider": _renewing(credentials), **_region(options)}


def current(options: Mapping[str, str]) -> dict[str, str]:
    """Returns the present credentials as options; {} if the reader must find them itself."""
    credentials = _found(options)
    if credentials is None:
        return {}
    keys = credentials.get_frozen_credentials()
    found = {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, **_region(options)}
    return found | ({"session_token": keys.token} if keys.token else {})


def s3_options(options: Mapping[str, str]) -> dict[str, str]:
    """Returns the options for a reader of S3. The reader takes the rest from AWS's variables, as the store
    does.
    """
    return current(options) | {key: value for key, value in options.items() if key in _OF_READERS}


def _found(options: Mapping[str, str]) -> Any:
    if "access_key_id" in options or "AWS_ACCESS_KEY_ID" in environment():
        return None  # obstore reads these itself, and botocore takes a while to load
    session = _session()
    return None if session is None else session.get_credentials()


def _renewing(credentials: Any) -> Callable[[], dict[str, Any]]:
    def give() -> dict[str, Any]:
        keys = credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return give


def _region(options: Mapping[str, str]) -> dict[str, str]:
    found = None if "region" in options else _session().get_config_variable("region")
    return {"region": found} if found else {}


@cache
def _session() -> Any:
    try:
        import botocore.session
    except ImportError:
        return None
    return botocore.session.get_session()


SINGLE_PUT_BYTES_MAX = 32 * 2**20
PART_BYTES_MIN = 8 * 2**20
PARTS_MAX = 9_000  # S3 allows 10,000
PARTS_AT_ONCE_MAX = 4
DELETE_BATCH_OBJECTS = 1_000
RETRIES_MAX = 10
READ_BUFFER_BYTES = 2**20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
Failures = list[tuple[str, Exception]]
_GUARD = ForkGuard("an object store in S3")
_STAGING = "dormouse-staging"
_FAILURES = (exceptions.BaseError, OSError)


@dataclass(frozen=True)
class S3Store:
    """An `ObjectStore` in a bucket, below a prefix.

    An object of up to `SINGLE_PUT_BYTES_MAX` bytes, and any that `put` writes, is one conditional PUT: of two
    writers, exactly one succeeds. Larger staged files are uploaded in parts, which obstore cannot make
    conditional, so the store looks the name up just before. If two such uploads of one name happen at the
    same time, the later object stays, complete. Writers that have their attempt's id in the name never
    collide.
    """

    bucket: str
    prefix: str
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, url: str, options: Mapping[str, str]) -> S3Store:
        parts = urlsplit(url)
        prefix = parts.path.removeprefix("/").removesuffix("/")
        try:
            check_prefix(prefix)
        except InvalidName as error:
            raise InvalidInput(f"Object store {url!r}: its prefix is not valid. {error}") from error
        if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
            raise InvalidInput(f"Object store {url!r}: give a bucket and a prefix, like s3://bucket/prefix")
        return cls(parts.netloc, prefix, dict(options))

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        with self._errors("write", check_name(name)):
            obstore.put(self._client, name, data, mode="create")

    @contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """Yields a path in `staging_dir`; the file is uploaded in parts, in bounded memory."""
        self._refuse_taken(check_name(name))
        with self._errors("stage", name):
            slot = self.staging_area().claim()
        path = slot.path(name.rpartition("/")[2])
        with closing(slot):
            with reporting_full_disk(name, self.url):
                yield path
            with self._errors("write", name):
                self._upload(slot.written(path.name), name)

    def copy(self, source: str, name: str) -> None:
        """Copies an object within the store."""
        self._refuse_taken(check_name(name))
        with self._errors("read", check_name(source)):
            obstore.copy(self._client, source, name)

    def get(self, name: str) -> bytes:
        with self._errors("read", check_name(name)):
            return bytes(obstore.get(self._client, name).bytes())

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self._errors("read", check_name(name)):
            found = bytes(obstore.get_range(self._client, name, start=start, length=length))
        return whole_range(found, length, name, self.url)

    def size(self, name: str) -> int:
        with self._errors("read", check_name(name)):
            return obstore.head(self._client, name)["size"]

    def reader(self, name: str) -> BinaryIO:
        with self._errors("read", check_name(name)):
            source = obstore.open_reader(self._client, name, buffer_size=READ_BUFFER_BYTES)
        return io.BufferedReader(_Raw(source, partial(self._errors, "read", name)), READ_BUFFER_BYTES)

    def delete(self, names: Iterable[str]) -> Failures:
        failures: Failures = []
        rest = iter(names)
        while batch := list(islice(rest, DELETE_BATCH_OBJECTS)):
            failures += self._delete_batch(batch)
        return failures

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        yield from ((name, size) for name, size, _ in self.list_dated(prefix))

    def list_dated(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        folder = check_prefix(prefix)
        with self._errors("list", prefix):
            for chunk in obstore.list(self._client, prefix=folder or None):
                yield from ((entry["path"], entry["size"], entry["last_modified"]) for entry in chunk)

    def local_path(self, name: str) -> Path | None:
        check_name(name)
        return None

    @contextmanager
    def pinned(self, names: Iterable[str]) -> Iterator[dict[str, Path]]:
        with closing(self.staging_area().claim()) as slot:
            found: dict[str, Path] = {}
            for number, name in enumerate(names):
                found[name] = slot.path(pinned_name(number, name))
                with self.reader(name) as source, found[name].open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            yield found

    def uri(self, name: str) -> str:
        return f"{self.url}/{check_name(name)}"

    def sweep_staging(self) -> int:
        return sum(StagingArea(folder).sweep() for folder in self._areas())

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling; another process opens its own connections."""
        return {"bucket": self.bucket, "prefix": self.prefix, "options": self.options}

    @property
    def _client(self) -> Client:
        _GUARD.check()
        return self._connected

    @cached_property
    def _connected(self) -> Client:
        return self._connect()

    def _connect(self, retries_max: int | None = None) -> Client:
        """Returns a client with the options; other settings come from AWS's variables and profiles."""
        config: dict[str, Any] = {k: v for k, v in self.options.items() if k != "staging_dir"}
        config |= provider(self.options)
        # an http endpoint can only be given on purpose, here or in AWS_ENDPOINT_URL; Amazon's own are https
        config["client_options"] = {"allow_http": True}
        retries: RetryConfig = {"max_retries": RETRIES_MAX if retries_max is None else retries_max}
        return Client(self.bucket, prefix=self.prefix or None, retry_config=retries, **config)

    def staging_area(self) -> StagingArea:
        given = self.options.get("staging_dir")
        return StagingArea(private_folder(_STAGING) if given is None else Path(given))

    def _areas(self) -> Iterator[Path]:
        """Yields the folders in which this and earlier processes may have staged objects."""
        given = self.options.get("staging_dir")
        yield from private_folders(_STAGING) if given is None else [Path(given)]

    def _refuse_taken(self, name: str) -> None:
        try:
            self.size(name)
        except ObjectNotFound:
            return
        raise taken(name, self.url)

    def _upload(self, path: Path, name: str) -> None:
        size = path.stat().st_size
        if size <= SINGLE_PUT_BYTES_MAX:
            obstore.put(self._client, name, path.read_bytes(), mode="create")
            return
        self._refuse_taken(name)
        part = max(PART_BYTES_MIN, size // PARTS_MAX + 1)
        obstore.put(
            self._client,
            name,
            path,
            use_multipart=True,
            chunk_size=part,
            max_concurrency=PARTS_AT_ONCE_MAX,
        )

    def _delete_batch(self, names: Sequence[str]) -> Failures:
        """Deletes objects by one bulk request; if that fails, deletes them one by one to find the failing
        ones.
        """
        failures, valid = _split_valid(names)
        try:
            if valid:
                obstore.delete(self._client, valid)
        except _FAILURES:
            # the bulk request was retried already: retries of each object would make an outage a thousand
            # times longer
            impatient = self._connect(retries_max=0)
            outcomes = ((name, self._delete_one(impatient, name)) for name in valid)
            failures += [(name, error) for name, error in outcomes if error]
        return failures

    def _delete_one(self, client: Client, name: str) -> Exception | None:
        try:
            with self._errors("delete", name):
                obstore.delete(client, name)
        except ObjectStoreError as error:
            return error
        return None

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        """Turns an error of obstore into an error of one line that names the object."""
        try:
            yield
        except exceptions.AlreadyExistsError as error:
            raise taken(name, self.url) from error
        except _FAILURES as error:
            if isinstance(error, FileNotFoundError) and verb == "read" and "NoSuchBucket" not in str(error):
                raise missing(name, self.url) from error
            raise failed(verb, name, self.url, _cause(error)) from error


class _Raw(io.RawIOBase):
    """A raw Python file over obstore's reader, in which pyarrow and other libraries can read and seek."""

    def __init__(self, source: obstore.ReadableFile, errors: Any) -> None:
        self._source = source
        self._errors = errors

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            data = self._source.read(len(buffer))
        buffer[: len(data)] = memoryview(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()


def _split_valid(names: Sequence[str]) -> tuple[Failures, list[str]]:
    failures: Failures = []
    valid = []
    for name in names:
        try:
            valid.append(check_name(name))
        except InvalidName as error:
            failures.append((name, error))
    return failures, valid


def _cause(error: Exception) -> str:
    """Returns the message that S3 gave, or the first line of obstore's."""
    text = str(error)
    if "/latest/api/token" in text:  # the address where AWS machines have their role's credentials
        return (
            "there are no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or give the machine a role"
        )
    said = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join((said[1] if said else text.splitlines()[0]).split())
