"""The program `dormouse serve`: it prints its URL, serves TLS, requires its token and shuts down cleanly."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pytest
import trustme

import dormouse as dm
from dormouse.service.app import check
from tests.serving import eventually
from tests.support.settings import load_service_settings

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
SECONDS_MAX = 120
IGNORING = ["sh", "-c", 'trap \'\' INT; exec "$0" "$@"']
ROWS = 100_000


@pytest.fixture(scope="module")
def dsn(new_database: Callable[[str], str], template_database: str) -> str:
    return new_database(template_database)


@pytest.fixture(scope="module")
def objects(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the object store of an instance with a table larger than any buffer of a socket."""
    url = (tmp_path_factory.mktemp("lake") / "objects").as_uri()
    values = [dm.Field("text", dm.STRING)]
    with dm.connect(dsn, url) as instance:
        table = instance.create_table("t", dm.Schema(row_keys=[dm.Field("key", dm.LONG)], values=values))
        table.ingest(pa.table({"key": range(ROWS), "text": ["x" * 200] * ROWS}))
    return url


@contextmanager
def served(
    dsn: str, objects: str, *options: str, ignored: bool = False
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process and the URL that it printed. With `ignored`, the process starts with SIGINT
    ignored.
    """
    command = [DORMOUSE, "serve", "--port", "0", "--json", "--dsn", dsn, "--objects", objects, *options]
    command = [*IGNORING, *command] if ignored else command
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> str:
    """Waits for the end of the process, checks its exit code, and returns its log."""
    _, log = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, log
    return log


def refused(*options: str) -> str:
    """Checks that a service does not start because of wrong options; returns the only line of its output."""
    command = [DORMOUSE, "serve", "--dsn", "host=/nowhere", "--objects", "file:///nowhere", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGTERM, True), pytest.param(signal.SIGINT, False, marks=pytest.mark.slow)],
)
def test_running_requests_finish_after_a_signal(dsn: str, objects: str, number: int, ignored: bool) -> None:
    """A service that starts with SIGINT ignored, as in the background of a shell, ends only at SIGTERM."""
    with served(dsn, objects, ignored=ignored) as (process, url):
        if ignored:
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        with httpx.stream("POST", f"{url}/v1/tables/t/query", json={}) as found:
            parts = found.iter_bytes()
            received = len(next(parts))
            process.send_signal(number)
            received += sum(map(len, parts))
        assert received > 200 * ROWS
        log = ended(process)
    assert f"POST /v1/tables/t/query 200 rows={ROWS}" in log
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
def test_requests_that_run_too_long_after_a_signal_are_cut_off(dsn: str, objects: str) -> None:
    with (
        served(dsn, objects, "--shutdown-seconds-max", "1") as (process, url),
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/tables/t/query", json={}) as found,
    ):
        parts = found.iter_raw()
        next(parts)
        process.send_signal(signal.SIGTERM)
        ended(process)
        list(parts)


@pytest.mark.slow
def test_a_service_with_tls_and_a_token(dsn: str, objects: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    certificate, key, token = (tmp_path / name for name in ("certificate.pem", "key.pem", "token"))
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    token.write_text("a-secret-token\n")
    token.chmod(0o600)
    options = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--token-file", str(token)]
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with served(dsn, objects, *options) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        assert httpx.get(f"{url}/health", verify=trusting).json() == {"status": "ok"}
        assert httpx.get(f"{url}/v1/tables", verify=trusting).status_code == 401
        headers = {"authorization": "Bearer a-secret-token"}
        body = {"where": {"key": 7}, "columns": ["key"]}
        found = httpx.post(f"{url}/v1/tables/t/query", json=body, headers=headers, verify=trusting)
        assert found.text == '{"key":7}\n'
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/health")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with warnings.catch_warnings(action="ignore"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", verify=old)
        process.send_signal(signal.SIGTERM)
        log = ended(process)
    assert "a-secret-token" not in log
    assert "GET /v1/tables 401 rows=0" in log


@pytest.mark.slow
def test_crashed_workers_are_replaced_and_all_workers_end_together(dsn: str, objects: str) -> None:
    """The metrics are sums over all workers. A killed supervisor leaves no worker behind."""
    with served(dsn, objects, "--workers", "2", "--sql-workers", "0") as (process, url):
        before = children(process.pid)
        assert len(before) == 2
        for _ in range(20):
            assert httpx.get(f"{url}/health").status_code == 200
        counted = 'dormouse_http_requests_total{method="GET",path="/health",status="200"} 20.0'
        assert all(counted in httpx.get(f"{url}/metrics").text for _ in range(8))
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: len(set(children(process.pid)) - set(before)) == 1)
        eventually(lambda: _answers(url, 8))
        process.send_signal(signal.SIGTERM)
        log = ended(process)
    assert f"process {before[0]}) was ended by signal 9; it is started again" in log
    assert not any(map(psutil.pid_exists, before))
    with served(dsn, objects, "--workers", "2", "--sql-workers", "0") as (process, url):
        left = children(process.pid)
        process.kill()
        eventually(lambda: not any(map(psutil.pid_exists, left)))


def _answers(url: str, times: int) -> bool:
    body = {"where": {"key": 7}, "columns": ["key"]}
    try:
        return all(
            httpx.post(f"{url}/v1/tables/t/query", json=body).text == '{"key":7}\n' for _ in range(times)
        )
    except httpx.TransportError:
        return False


def children(process_id: int) -> list[int]:
    return [child.pid for child in psutil.Process(process_id).children()]


def test_settings_that_prevent_a_start_are_one_line(tmp_path: Path) -> None:
    nothing, wrong = tmp_path / "nothing.pem", tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    wrong.chmod(0o600)
    assert "give a token" in refused("--host", "0.0.0.0")  # noqa: S104
    bad: list[tuple[dict[str, Path], Path]] = [
        ({"token_file": nothing}, nothing),
        ({"token_file": wrong}, wrong),
        ({"tls_certificate": nothing, "tls_key": wrong}, nothing),
        ({"tls_certificate": wrong, "tls_key": wrong}, wrong),
    ]
    for given, named in bad:
        with pytest.raises(dm.errors.InvalidInput, match=str(named)):
            check(load_service_settings(**given))


@pytest.mark.slow
def test_a_port_in_use_is_one_line(dsn: str, objects: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [DORMOUSE, "serve", "--port", port, "--dsn", dsn, "--objects", objects]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert (done.returncode, done.stderr) == (
        1,
        f"dormouse: cannot listen on 127.0.0.1:{port}: Address already in use\n",
    )
