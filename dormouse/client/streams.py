"""Arrow IPC streams over HTTP: one message in memory at a time, and never a part taken for the whole."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
import pyarrow as pa

from dormouse.client.http import Http, problem_error
from dormouse.errors import DormouseError, InstanceError, InvalidQuery
from dormouse.model.values import Parameters, given
from dormouse.reading.parameters_json import parameters_json
from dormouse.reading.sources import Source
from dormouse.reading.streams import Frames, shown_reader

PROBLEM = b"dormouse.problem"
ARROW = "application/vnd.apache.arrow.stream"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format"""


class AnswerReader(Frames, pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]
    """The batches of an answer, read as they come; its connection ends when it is closed or dropped."""

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
        """Ends the connection: the service stops working on the answer."""
        self._release()
        super().close()


def rows_of(http: Http, path: str, body: Mapping[str, Any]) -> AnswerReader:
    """Returns the rows that a service answers to a request."""
    return AnswerReader(http, http.open("POST", path, body, accept=ARROW))


def statement_json(statement: object, parameters: Parameters | None) -> dict[str, Any]:
    """Returns a statement with its parameters as `/v1/sql` takes it. Raises `InvalidQuery`."""
    if not isinstance(statement, str):
        raise InvalidQuery(f"a statement must be a string, not {statement!r}")
    asked: dict[str, Any] = {"statement": statement}
    return asked if parameters is None else asked | {"parameters": parameters_json(given(parameters))}


class _Messages:
    """A stream's bytes, message by message; raises the problem that a message tells of.

    Arrow reads no further than the end-of-stream marker: it reaches the end of the bytes only when the
    connection was cut.
    """

    closed = False

    def __init__(self, body: _Body) -> None:
        self._body = body
        # Arrow keeps this object for as long as anybody can read, also when the Python reader is gone
        self._dropped = weakref.finalize(self, body.drop)
        self._reader: pa.ipc.MessageReader | None = None
        self._schema = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.release()

    def release(self) -> None:
        """Ends the connection, unless it has ended."""
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
            # before a problem it may come again
            again, self._schema = bool(self._schema), message.serialize().to_pybytes()
            return b"" if again else self._schema
        if PROBLEM in message.metadata.to_pybytes():
            self._check(message)
        return message.serialize()

    def _check(self, message: pa.ipc.Message) -> None:
        """Raises what a message's own metadata tell, not its name in some statistics."""
        stream = pa.BufferReader(self._schema + message.serialize().to_pybytes())
        batch = pa.ipc.open_stream(stream).read_next_batch_with_custom_metadata()
        if batch.custom_metadata and PROBLEM in batch.custom_metadata:
            self.release()
            raise self._body.problem(batch.custom_metadata[PROBLEM])


class _Body:
    """The bytes of an answer, as Arrow asks for them; an error at their end."""

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
        """Another thread ends the answer: the collector's may hold the lock of the connections."""
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
        """The error that a message tells of."""
        try:
            return problem_error(json.loads(document), self._http.url)
        except ValueError:
            return InstanceError(f"{self._http.url}: the query failed, and there is no reason given")

    def finish(self) -> None:
        """Reads the end of the answer, so that its connection can be used again."""
        with suppress(httpx.HTTPError):
            next(self._chunks, None)


def _chunks(response: httpx.Response) -> Iterator[bytes]:
    """The bytes, until whoever reads them is done."""
    try:
        yield from response.iter_bytes()
    finally:
        response.close()
