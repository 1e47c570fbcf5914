"""Requests to a query service. A request is retried until an answer begins; a failure is one clear line."""

from __future__ import annotations

import json
import os
import re
import ssl
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pyarrow as pa

from dormouse import errors
from dormouse.errors import (
    DormouseError,
    IndexNotReady,
    InstanceError,
    InstanceForbidden,
    InstanceReadOnly,
    InvalidInput,
    InvalidPayload,
)
from dormouse.model.json_values import json_text
from dormouse.model.loops import backoff_seconds, tries
from dormouse.model.text import path_segment
from dormouse.reading.streams import Frames, Source, shown_reader
from dormouse.settings.service import check_token
from dormouse.verbs.verb import Http as HttpDoor
from dormouse.verbs.verb import Verb, json_of

CONNECT_SECONDS_MAX = 10.0
CONNECTIONS_MAX = 256
"""The number of answers that can be read at once. Each uses a connection until it is read, closed or
dropped.
"""

IDLE_SECONDS_MAX = 2.0
"""The time after which the client closes an idle connection.

A service keeps idle connections longer, so the client never uses a connection that is being closed.
"""

ATTEMPTS_MAX = 6
RETRY_SECONDS_MAX = 30.0
PROBLEM_BYTES_MAX = 1 << 20
_BACKOFF_SECONDS = 0.2
_BUSY = {429, 503}
_PROBLEM = "application/problem+json"
_STANDARD = {"type", "title", "status", "detail", "instance"}
"""The members that every problem document can have."""
_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_CLASSES = {
    "urn:dormouse:" + _WORD.sub("-", name).lower(): found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, DormouseError)
}


class Http:
    """The connections to one service. Threads can share them; a forked child opens its own."""

    def __init__(self, url: str, token: str | None, ca: str | None, timeout_seconds: float) -> None:
        self.url = _checked_url(url)
        if token:
            _check_token(token)
        self.is_closed = False
        self._new_client = partial(
            httpx.Client,
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            verify=_tls(ca) if self.url.startswith("https:") else False,
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, CONNECT_SECONDS_MAX)),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=IDLE_SECONDS_MAX),
        )
        self._client, self._process = self._new_client(), os.getpid()

    def close(self) -> None:
        self.is_closed = True
        if self._process == os.getpid():  # a parent's connections stay its own
            self._client.close()

    def _connections(self) -> httpx.Client:
        """Returns the connections of this process.

        A forked child must not use its parent's connections, because it would read the parent's answers.
        """
        if self.is_closed:
            raise InstanceError(f"the client of {self.url} is closed: connect again")
        if self._process != os.getpid():
            self._client, self._process = self._new_client(), os.getpid()
        return self._client

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer."""
        return self._json_of(self.open(method, path, body, accept="application/json"))

    def open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, accept: str
    ) -> httpx.Response:
        """Returns a successful answer, whose body is still unread. The caller closes it."""
        content = None if body is None else _json(body)
        pause = partial(backoff_seconds, seconds_min=_BACKOFF_SECONDS, seconds_max=RETRY_SECONDS_MAX)
        for this in tries(RETRY_SECONDS_MAX, tries_max=ATTEMPTS_MAX, pause=pause):
            try:
                with self.named_failures():
                    response = self._send(method, path, content, accept)
                if response.is_success:
                    return response
                busy = response.status_code in _BUSY
                this.pause_seconds = max(this.pause_seconds, _retry_after(response))
                failure = self._failure(path, response)
                # a request that only reads can be repeated; callers say how long to wait for an index
                busy = busy and not isinstance(failure, InstanceReadOnly | IndexNotReady)
            except _NotConnected as error:
                failure, busy = error.failure, True
            if not busy or this.pause_seconds > this.seconds_left:
                break
        raise failure

    def send_file(self, path: str, content: Iterator[bytes], content_type: str) -> Any:
        """Sends a file once, and returns the JSON of the answer."""
        client = self._connections()
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = client.build_request("POST", path, content=content, headers=headers)
        try:
            with self.named_failures():
                response = client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise InstanceError(f"cannot connect to {self.url}: {_text(error)}") from error
        if not response.is_success:
            raise self._failure(path, response)
        return self._json_of(response)

    def _json_of(self, response: httpx.Response) -> Any:
        with self.named_failures():
            try:
                return json.loads(response.read())
            except ValueError:
                raise self.not_ours(response, "did not answer in JSON") from None
            finally:
                response.close()

    def _send(self, method: str, path: str, content: bytes | None, accept: str) -> httpx.Response:
        client = self._connections()
        headers = {"Accept": accept} | ({} if content is None else {"Content-Type": "application/json"})
        request = client.build_request(method, path, content=content, headers=headers)
        try:
            return client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            failure = InstanceError(f"cannot connect to {self.url}: {_text(error)}")
            if "certificate" in str(error).lower():
                raise failure from error  # another try would fail in the same way
            raise _NotConnected(failure) from error

    def _failure(self, path: str, response: httpx.Response) -> DormouseError:
        """Returns the error that an answer with a failure describes."""
        try:
            with self.named_failures():
                kind = response.headers.get("Content-Type", "").partition(";")[0]
                problem = json.loads(_first_bytes(response)) if kind == _PROBLEM else None
        except ValueError:
            problem = None
        finally:
            response.close()
        if isinstance(problem, dict):
            return problem_error({"status": response.status_code} | problem, f"{self.url}{path}")
        reason = f"{response.status_code} {response.reason_phrase}".strip()
        return self.not_ours(response, f"answered {reason}")

    def not_ours(self, response: httpx.Response, what: str) -> InstanceError:
        """Returns the error for an answer that cannot come from a query service."""
        path = response.request.url.raw_path.decode("ascii")
        return InstanceError(f"{self.url}{path} {what}: is it the query service of a Dormouse instance?")

    @contextmanager
    def named_failures(self) -> Iterator[None]:
        """Turns failures of the network into `InstanceError`."""
        try:
            yield
        except httpx.PoolTimeout as error:
            raise InstanceError(
                f"{CONNECTIONS_MAX} answers of {self.url} are being read; close those that are not needed"
            ) from error
        except httpx.TimeoutException as error:
            seconds = self._client.timeout.read
            raise InstanceError(f"{self.url} sent nothing for {seconds:g} seconds") from error
        except httpx.HTTPError as error:
            raise InstanceError(f"the connection to {self.url} broke: {_text(error)}") from error


class _NotConnected(Exception):
    def __init__(self, failure: InstanceError) -> None:
        self.failure = failure


def problem_error(problem: Mapping[str, Any], url: str) -> DormouseError:
    """Returns the error in a problem document: of its own class, or `InstanceError` for an unknown class."""
    message = str(problem.get("detail") or problem.get("title") or "there is no reason given")
    found = _CLASSES.get(str(problem.get("type")))
    if found is None:  # an error of the service itself
        status = problem.get("status")
        refused = InstanceForbidden if status in {401, 403} else InstanceError
        return refused(f"{url} answered {status}: {message}" if status else f"{url}: {message}")
    data = {name: value for name, value in problem.items() if name not in _STANDARD}
    return found.from_message(message, data)


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json_text(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayload(f"what is asked is not JSON: {error}") from None


def _checked_url(url: str) -> str:
    if "@" in str(url):  # a URL may have a password before the @
        raise InvalidInput("the URL of a query service has no user and no password: give a token")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except (AttributeError, TypeError, ValueError):
        valid = False
    if not valid or parts.query or parts.fragment:
        raise InvalidInput(f"the URL of a query service is like https://dormouse.example:8088, not {url!r}")
    return url.rstrip("/")


def _check_token(token: str) -> None:
    try:
        check_token(token, "the token")
    except ValueError as error:
        raise InvalidInput(f"{error}, without a space or the end of a line") from None


def _tls(ca: str | None) -> ssl.SSLContext:
    if ca is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # also raised for a file without a certificate
        raise InvalidInput(f"ca {ca!r} cannot be read as certificates: {error}") from None


def _first_bytes(response: httpx.Response) -> bytes:
    found = bytearray()
    for chunk in response.iter_bytes():
        found += chunk
        if len(found) > PROBLEM_BYTES_MAX:
            break
    return bytes(found)


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


def _text(error: Exception) -> str:
    """Returns the first line of an error's message, which can be empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# Arrow IPC streams over HTTP: one message in memory at a time; an incomplete stream is an error.

PROBLEM = b"dormouse.problem"
ARROW = "application/vnd.apache.arrow.stream"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The marker at the end of a stream:
https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format
"""


class AnswerReader(Frames, pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]
    """The batches of an answer, read as they arrive. Closing or dropping the reader closes its connection."""

    def __init__(self, http: Http, response: httpx.Response) -> None:
        source = _Messages(_Body(http, response))
        self._release = source.release
        try:
            super().__init__(source)
        except pa.ArrowException:
            self._release()
            raise http.not_ours(response, "did not answer in Arrow") from None
        except BaseException:
            self._release()
            raise

    def __repr__(self) -> str:
        return shown_reader(self.schema)

    def close(self) -> None:
        """Closes the connection, which stops the service's work on the answer."""
        self._release()
        super().close()


def ask(http: Http, verb: Verb, given: Mapping[str, Any]) -> Any:
    """Returns the service's answer to a verb with these Python values: an `AnswerReader`, or JSON."""
    door = cast(HttpDoor, verb.http)
    body = json_of(verb.request, given)
    path = re.sub(r"{(\w+)}", lambda name: path_segment(body.pop(name[1])), door.path)
    if door.answer is not None:
        return http.json("POST", path, body)
    return AnswerReader(http, http.open("POST", path, body, accept=ARROW))


class _Messages:
    """The bytes of a stream, message by message. Raises the problem that a message contains.

    Arrow stops at the end-of-stream marker. So it asks for bytes at their end only if the connection was cut.
    """

    closed = False

    def __init__(self, body: _Body) -> None:
        self._body = body
        # Arrow keeps this object as long as the stream can be read, also without the Python reader
        self._dropped = weakref.finalize(self, body.drop)
        self._reader: pa.ipc.MessageReader | None = None
        self._schema = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.release()

    def release(self) -> None:
        """Closes the connection, if it is open."""
        if self._dropped.detach():
            self._body.end()

    def read(self, size: int) -> bytes:
        while not self._ready:
            self._ready = memoryview(self._next())
        found, self._ready = self._ready[:size], self._ready[size:]
        return bytes(found)

    def _next(self) -> Any:
        if not self._dropped.alive:
            raise InstanceError("the answer was closed before it was read to its end")
        if not self._body.is_of_this_process:
            raise InstanceError("the answer is read by the process that this one was forked from: ask again")
        if self._reader is None:
            self._reader = pa.ipc.MessageReader.open_stream(self._body)
        try:
            message = self._reader.read_next_message()
        except StopIteration:
            self._body.finish()
            self.release()
            return _END_OF_STREAM
        except BaseException:
            self.release()
            raise
        if message.type == "schema":
            # it can be repeated before a problem
            again, self._schema = bool(self._schema), message.serialize().to_pybytes()
            return b"" if again else self._schema
        if PROBLEM in message.metadata.to_pybytes():
            self._check(message)
        return message.serialize()

    def _check(self, message: pa.ipc.Message) -> None:
        """Raises the problem that a message's own metadata has; such a key inside column statistics is
        ignored.
        """
        stream = pa.BufferReader(self._schema + message.serialize().to_pybytes())
        batch = pa.ipc.open_stream(stream).read_next_batch_with_custom_metadata()
        if batch.custom_metadata and PROBLEM in batch.custom_metadata:
            self.release()
            raise self._body.problem(batch.custom_metadata[PROBLEM])


class _Body:
    """The bytes of an answer, as Arrow requests them. A read past their end raises an error."""

    closed = False

    def __init__(self, http: Http, response: httpx.Response) -> None:
        self.response = response
        self._http = http
        self._chunks = _chunks(response)
        self._source = Source(self._chunks)
        self._process = os.getpid()
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass

    @property
    def is_of_this_process(self) -> bool:
        return self._process == os.getpid()

    def end(self) -> None:
        if self.is_of_this_process:
            self.response.close()
            self._source.drop()

    def drop(self) -> None:
        """Closes the answer in another thread.

        The garbage collector may call this in a thread that holds the connections' lock.
        """
        if self.is_of_this_process:
            self._source.drop()

    def read(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            if not self._chunk:
                self._chunk = memoryview(self._more())
            parts.append(self._chunk[:missing])
            self._chunk = self._chunk[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def _more(self) -> bytes:
        try:
            with self._http.named_failures():
                for chunk in self._chunks:
                    return chunk
        except Exception as error:
            if self._http.is_closed:
                raise InstanceError(
                    f"the client of {self._http.url} was closed before this answer was read to its end"
                ) from error
            raise
        raise InstanceError(
            f"the connection to {self._http.url} was cut in the middle of an answer; ask again"
        )

    def problem(self, document: bytes) -> DormouseError:
        """Returns the error that a problem document in a message describes."""
        try:
            return problem_error(json.loads(document), self._http.url)
        except ValueError:
            return InstanceError(f"{self._http.url}: the query failed, and there is no reason given")

    def finish(self) -> None:
        """Reads the rest of the answer, so that its connection can be used again."""
        with suppress(httpx.HTTPError):
            next(self._chunks, None)


def _chunks(response: httpx.Response) -> Iterator[bytes]:
    """Yields the bytes of an answer until the reader stops."""
    try:
        yield from response.iter_bytes()
    finally:
        response.close()
