"""Tests of unknown clients. They can hold few connections for a short time, and fill no memory or disk."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import dormouse as dm
from dormouse.service import protocol
from dormouse.service.app import check
from dormouse.service.protocol import connections_possible
from tests.serving import connected, eventually, http_get, serving, stand_in
from tests.support.settings import load_service_settings

TOKEN = "s3cret-token"  # noqa: S105
HOLDER = {"authorization": f"Bearer {TOKEN}"}
SOME = stand_in()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
TABLES = f"GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()


def is_open(sock: object) -> bool:
    """Returns whether the server has kept the connection open."""
    sock.setblocking(False)  # type: ignore[attr-defined]
    try:
        while sock.recv(1_000_000):  # type: ignore[attr-defined]
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_only_connections_with_the_token_may_stay_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STRANGER_SECONDS_MAX", 0.3)
    with serving(SOME, token=TOKEN) as url:
        silent, asks, holds = (connected(url) for _ in range(3))
        asks.sendall(HEALTH)
        holds.sendall(TABLES)
        eventually(lambda: not is_open(silent) and not is_open(asks))
        time.sleep(0.3)
        assert is_open(holds)
        for sock in (silent, asks, holds):
            sock.close()


@pytest.mark.slow
def test_connections_without_the_token_are_closed_first() -> None:
    with serving(SOME, token=TOKEN, connections_max=4) as url:
        holder = connected(url)
        holder.sendall(TABLES)
        eventually(lambda: holder.recv(1).startswith(b"H"))
        strangers = [connected(url) for _ in range(10)]
        eventually(lambda: sum(map(is_open, strangers)) <= 3)
        assert is_open(holder)
        assert http_get(f"{url}/v1/tables/x", headers=HOLDER).status_code != 401
        for sock in (holder, *strangers):
            sock.close()


def test_the_limit_of_connections_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: limits.append(found))
    assert connections_possible(1_000) == 64
    limits.append((256, 4_096))
    assert connections_possible(1_000) == 1_000 and limits[-1] == (2_128, 4_096)


def test_metrics_count_unknown_methods_as_other() -> None:
    with serving(SOME) as url:
        for method in ("PROPFIND", "MKCOL", "REPORT"):
            assert httpx.request(method, f"{url}/v1/sql").status_code == 405
        text = http_get(f"{url}/metrics").text
        assert "PROPFIND" not in text
        assert 'dormouse_http_requests_total{method="other",path="/v1/sql",status="405"} 3.0' in text


def test_the_page_that_takes_the_token_loads_scripts_only_from_the_service() -> None:
    with serving(SOME, token=TOKEN) as url:
        page = http_get(f"{url}/docs")
        assert "script-src 'self';" in page.headers["content-security-policy"]
        assert "http" not in page.text and "<script>" not in page.text
        for part in ("swagger-ui.css", "swagger-ui-bundle.js", "begin.js"):
            assert f"docs/{part}" in page.text
            assert http_get(f"{url}/docs/{part}").status_code == 200


@pytest.fixture(params=["token_file", "job_tokens_file"])
def read_token(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[], object]]]:
    path = tmp_path / "tokens"
    path.write_text(TOKEN if request.param == "token_file" else f"etl * {TOKEN}\n")

    def read() -> object:
        return check(load_service_settings(job_threads=0, **{request.param: path}))

    yield path, read


def test_a_token_file_that_other_users_can_read_is_refused(
    read_token: tuple[Path, Callable[[], object]],
) -> None:
    path, read = read_token
    path.chmod(0o644)
    with pytest.raises(dm.errors.InvalidInput, match=f"other users can read {path}.*: chmod o-rwx {path}"):
        read()
    path.chmod(0o640)
    read()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# none yet\n", "has no token"),
        ("\netl ingst,compact t\n", "line 2 of .*: kind 'ingst' is none of"),
    ],
)
def test_a_file_of_tokens_without_a_valid_right_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(dm.errors.InvalidInput, match=why):
        check(load_service_settings(job_threads=0, job_tokens_file=path))
