"""Payloads over HTTP: they are put, read and deleted by key, with tokens that grant the rights."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from dormouse.client import connect
from dormouse.client.payloads import RemotePayloads
from dormouse.errors import InvalidPayload, PayloadExpired, PayloadNotFound
from dormouse.payloads.keys import checked
from tests.cooling import AT
from tests.serving import serving
from tests.support.api import Instance
from tests.support.jobs import PayloadStore

PATH = "/v1/payloads/acme/17%2Fa/2026-03-05T12:00:00Z/request"
KEY = {"tenant": "acme", "id": "17/a", "inserted_at": "2026-03-05T12:00:00Z", "kind": "request"}


@pytest.mark.few(2)
@pytest.mark.parametrize("content", ["null", '{"a": [1, 2.5, "é", 12345678901234567890]}', "[]", '"x"'])
def test_a_payload_is_put_read_and_deleted(instance: Instance, content: str) -> None:
    json = {"content-type": "application/json"}
    with serving(instance, job_threads=0) as url, httpx.Client(base_url=url) as http:
        assert http.put(PATH, content=content, headers=json).status_code == 204
        found = http.get(PATH)
        assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
        assert found.json() == instance.payloads.get("acme", "17/a", AT, "request")
        assert http.put(PATH, content=b"[2]", headers=json).status_code == 204
        instance.payloads.offload()
        assert http.get(PATH).json() == [2]
        assert http.delete(PATH).status_code == 204
        gone = http.get(PATH)
        assert (gone.status_code, gone.json()["type"]) == (404, "urn:dormouse:payload-not-found")


@pytest.mark.slow
def test_many_payloads_are_read_with_an_error_in_place_of_a_missing_one(instance: Instance) -> None:
    given = [{**KEY, "id": f"{n}", "content": n or None} for n in range(3)]
    with serving(instance, job_threads=0) as url, httpx.Client(base_url=url) as http:
        assert http.post("/v1/payloads", json={"payloads": given}).json() == {"kept": 3}
        refused = http.post("/v1/payloads", json={"payloads": [given[0], {**given[1], "content": "\x00"}]})
        assert (refused.status_code, "NUL" in refused.json()["detail"]) == (400, True)
        keys = [{**KEY, "id": one} for one in ("2", "none", "0")]
        found = http.post("/v1/payloads/get", json={"keys": keys}).json()["payloads"]
        assert [one["id"] for one in found] == ["2", "none", "0"]
        assert (found[0]["content"], found[2]["content"]) == (2, None)
        assert found[1]["problem"]["type"] == "urn:dormouse:payload-not-found"


@pytest.mark.slow
def test_a_client_stores_and_reads_payloads_like_an_instance(instance: Instance) -> None:
    """The client and the instance have the same keys, contents and errors."""
    contents: list[Any] = [None, [], {"a": [1, 2.5, "é\n", 2**70, True]}, "x", 0.5, ""]
    with serving(instance, job_threads=0) as url, connect(url) as client:
        stores: list[PayloadStore | RemotePayloads] = [instance.payloads, client.payloads]
        for store, other in (stores, stores[::-1]):
            for n, content in enumerate(contents):
                key = ("t/ü", f"{n} + %2F", AT + timedelta(microseconds=n), "k?")
                store.put(*key, content)
                assert repr(other.get(*key)) == repr(store.get(*key)) == repr(content)
            key = ("t", "many", AT, "k")
            store.put_many(iter([(*key, 1), ("t", "other", AT, "k", 2), (*key, 3)]))
            wanted = [key, ("t", "none", AT, "k"), ("t", "other", AT, "k")]
            found, expected = store.get_many(wanted), other.get_many(wanted)
            assert list(found) == list(expected) == [checked(one) for one in wanted]
            assert [found[checked(one)] for one in wanted[::2]] == [3, 2]
            missing = [str(one) for one in (found[checked(wanted[1])], expected[checked(wanted[1])])]
            assert missing[0] == missing[1]
            assert isinstance(found[checked(wanted[1])], PayloadNotFound)
            store.delete(*key)
            store.delete(*key)
            with pytest.raises(PayloadNotFound):
                other.get(*key)
            store.delete_many([("t", "other", AT, "k"), ("t", "none", AT, "k")])
            assert isinstance(other.get_many([wanted[2]])[checked(wanted[2])], PayloadNotFound)
            assert (store.get_many([]), store.put_many([])) == ({}, None)
            for wrong in (
                lambda store=store: store.put("", "1", AT, "k", 1),
                lambda store=store: store.put("t", "1", AT.replace(tzinfo=None), "k", 1),
                lambda store=store: store.put("t", "1", AT, "k", float("nan")),
                lambda store=store: store.put("t", "1", AT, "k", {1: 2}),
                lambda store=store: store.put_many([("t", "1")]),
                lambda store=store: store.get("t", "1", "now", "k"),
                lambda store=store: store.get_many([("t",)]),
                lambda store=store: store.delete("t", "1" * 513, AT, "k"),
            ):
                with pytest.raises(InvalidPayload):
                    wrong()
        old = datetime(2020, 1, 1, tzinfo=UTC)
        client.payloads.put("t", "1", old, "k", 1)
        instance.payloads.expire(old.date() + timedelta(days=1))
        for store in stores:
            with pytest.raises(PayloadExpired):
                store.get("t", "1", old, "k")
            with pytest.raises(PayloadExpired):
                store.put("t", "1", old, "k", 1)
        with pytest.raises(InvalidPayload, match=r"2,000 payloads.*1,000"):
            client.payloads.put_many([("t", f"{n}", AT, "k", n) for n in range(2_000)])
        assert len(client.payloads.get_many([("t", f"{n}", AT, "k") for n in range(1_500)])) == 1_500


def test_a_damaged_payload_is_counted(instance: Instance) -> None:
    instance.payloads.put("acme", "17/a", AT, "request", [1])
    instance.payloads.offload()
    instance._objects.delete([name for name, _ in instance._objects.list("payloads")])
    with serving(instance) as url, httpx.Client(base_url=url) as http:
        assert "dormouse_payload_mismatches_total 0.0" in http.get("/metrics").text
        assert http.get(PATH).json()["type"] == "urn:dormouse:payload-corrupt"
        assert "dormouse_payload_mismatches_total 1.0" in http.get("/metrics").text


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/payloads/t/i/2026-03-05T12:00:00/k", "inserted_at must be a datetime with a time zone"),
        ("/v1/payloads/t/i/yesterday/k", "write it like 2026-03-05T12:00:00Z"),
        ("/v1/payloads/dormouse/i/2026-03-05T12:00:00Z/dormouse.job.request", "are for jobs of Dormouse"),
    ],
)
def test_invalid_keys_are_refused(instance: Instance, path: str, why: str) -> None:
    with serving(instance, job_threads=0) as url, httpx.Client(base_url=url) as http:
        for answer in (http.get(path), http.put(path, json=1), http.delete(path)):
            assert answer.status_code == 400
            assert why in answer.json()["detail"]


def test_a_token_without_the_right_to_read_payloads_is_refused(instance: Instance, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("all * token-all\netl query,ingest token-etl\napp payloads token-app\n")
    tokens.chmod(0o600)
    settings: dict[str, Any] = {"job_threads": 0, "token": "own", "job_tokens_file": tokens}
    with serving(instance, **settings) as url, httpx.Client(base_url=url) as http:
        for token, may in (("own", True), ("token-app", True), ("token-all", False), ("token-etl", False)):
            headers = {"authorization": f"Bearer {token}"}
            answers = [
                http.put(PATH, json=1, headers=headers),
                http.get(PATH, headers=headers),
                http.post("/v1/payloads/get", json={"keys": [KEY]}, headers=headers),
                http.post("/v1/payloads", json={"payloads": [{**KEY, "content": 1}]}, headers=headers),
                http.delete(PATH, headers=headers),
            ]
            assert [one.status_code for one in answers] == ([204, 200, 200, 200, 204] if may else [403] * 5)
        assert http.get(PATH).status_code == 401


def test_a_service_that_takes_no_jobs_writes_no_payloads(instance: Instance) -> None:
    instance.payloads.put("acme", "17/a", AT, "request", 1)
    with serving(instance) as url, httpx.Client(base_url=url) as http:
        assert http.get(PATH).json() == 1
        assert [http.put(PATH, json=2).status_code, http.delete(PATH).status_code] == [405, 405]
