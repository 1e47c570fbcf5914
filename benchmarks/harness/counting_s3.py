"""A moto S3 server that counts the requests it answers, by HTTP method."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

BUCKET = "benchmark"


class CountingS3:
    """A running S3 server with one bucket. The AWS environment variables of this process point to it."""

    def __init__(self, url: str, requests: Counter[str]) -> None:
        self.objects = f"s3://{BUCKET}/lake"
        self._url = url
        self._requests = requests

    def taken(self) -> Counter[str]:
        """Returns the number of requests by method since the last call, and resets the counts."""
        counts = self._requests.copy()
        self._requests.clear()
        return counts


@contextmanager
def counting_s3() -> Iterator[CountingS3]:
    """Starts the server and sets the AWS environment variables; restores them at the end."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    requests: Counter[str] = Counter()
    inner: Any = server._server
    inner.app = _counted(inner.app, requests)
    url = "http://{}:{}".format(*server.get_host_and_port())
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        urlopen(Request(f"{url}/{BUCKET}", method="PUT")).close()  # noqa: S310
        yield CountingS3(url, requests)
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _counted(app: Callable[..., Any], requests: Counter[str]) -> Callable[..., Any]:
    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        requests[environ["REQUEST_METHOD"]] += 1
        return app(environ, start_response)

    return serve
