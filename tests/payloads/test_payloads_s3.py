"""Payloads whose objects are in S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest

import dormouse as dm
from dormouse.errors import PayloadCorrupt
from dormouse.payloads import cooling
from tests.conftest import BUCKET
from tests.cooling import DAY, Model, key, names, stored, tools
from tests.support.api import Instance
from tests.support.jobs import PayloadStore
from tests.support.objects import ObjectStore


@pytest.fixture
def lake(dsn: str, s3_store: ObjectStore) -> Iterator[Instance]:
    with dm.connect(dsn, s3_store.url, **s3_store.options) as instance:
        yield instance


@pytest.mark.slow
def test_a_day_in_s3_from_put_to_blocks(lake: Instance) -> None:
    model = Model(lake.payloads)
    model.put(*map(key, names(30)))
    assert cooling.offload(tools(lake), None, False).errors == ()
    model.check(key("a"))
    model.put(key("a0002"), content="late")
    assert cooling.fold(tools(lake), DAY).errors == ()
    fresh = Model(PayloadStore(lake._supplier, lake._objects))
    fresh.expected = model.expected
    fresh.check(key("a"), key("zzz"))
    assert lake.payloads.verify(DAY).problems == ()
    assert lake.check(deep=True).problems == ()


def test_a_truncated_object_in_s3_differs_from_a_failing_store(
    lake: Instance, s3_options: dict[str, str]
) -> None:
    model = Model(lake.payloads)
    model.put(*map(key, names(4)))
    cooling.offload(tools(lake, object_bytes_min=10**6, object_bytes_max=10**6), None, False)
    [name] = stored(lake)
    client: Any = boto3.client(
        "s3",
        endpoint_url=s3_options["endpoint"],
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
    )
    full = lake._objects.uri(name).removeprefix(f"s3://{BUCKET}/")
    data = client.get_object(Bucket=BUCKET, Key=full)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=full, Body=data[:20])
    found = lake.payloads.get_many(model.expected)
    assert {type(one) for one in found.values()} == {PayloadCorrupt}
    client.delete_object(Bucket=BUCKET, Key=full)
    found = lake.payloads.get_many(model.expected)
    assert {type(one) for one in found.values()} == {PayloadCorrupt}
    client.put_object(Bucket=BUCKET, Key=full, Body=data)
    model.check()
