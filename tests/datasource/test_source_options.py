"""Faults in the options of `format("dormouse")`, which the driver finds before it plans a read."""

from __future__ import annotations

import pytest

from dormouse.datasource.source import DormouseSource
from dormouse.errors import DormouseError


def test_a_missing_bucket_is_reported_in_one_line(
    dsn: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials are in the environment, as on a driver."""
    monkeypatch.setattr("dormouse.objects.s3.RETRIES_MAX", 0)
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DormouseError, match="nowhere-there") as raised:
        DormouseSource({"dsn": dsn, "objects": "s3://nowhere-there/lake", "table": "t"}).schema()
    assert "\n" not in str(raised.value)
