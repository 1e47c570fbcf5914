"""The environments of the lambdas: a lambda reads the variables that its stack writes."""

from __future__ import annotations

import pytest

from dormouse.errors import InvalidInput
from dormouse.settings.lambdas import CommitEnvironment, CompactionEnvironment
from tests.support.settings import load_environment


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSN", "OBJECTS", "RECEIVES_MAX", "JOBS_MAX", "INSTANCE_ID", "CONNECT_SECONDS_MAX"):
        monkeypatch.delenv(f"DORMOUSE_{name}", raising=False)


def test_the_lambda_reads_the_variables_that_its_stack_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"dsn": "rds-iam://r@h:5432/d?region=eu-west-1", "objects": "s3://b/data", "jobs_max": 7}
    for name, text in CompactionEnvironment.variables(instance_id="dev", **values).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    found = load_environment(CompactionEnvironment)
    assert (found.dsn, found.objects, found.jobs_max) == tuple(values.values())
    assert (found.instance_id, found.region, found.function_name) == ("dev", "eu-west-1", None)


def test_all_missing_and_invalid_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://user:secret@h/d")
    monkeypatch.setenv("DORMOUSE_RECEIVES_MAX", "none")
    with pytest.raises(InvalidInput) as error:
        load_environment(CommitEnvironment)
    message = str(error.value)
    assert "DORMOUSE_OBJECTS" in message and "DORMOUSE_RECEIVES_MAX" in message
    assert "\n" not in message and "secret" not in message


def test_a_stack_that_omits_or_invents_variables_gets_an_error() -> None:
    with pytest.raises(InvalidInput, match="CommitEnvironment needs dsn, objects"):
        CommitEnvironment.variables(instance_id="dev")
    with pytest.raises(InvalidInput, match="CommitEnvironment has no colour, region"):
        CommitEnvironment.variables(dsn="d", objects="o", colour="red", region="eu-west-1")


def test_an_environment_cannot_be_changed_and_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://user:secret@h/d")
    monkeypatch.setenv("DORMOUSE_OBJECTS", "s3://b")
    found = load_environment(CommitEnvironment)
    with pytest.raises(ValueError, match="frozen"):
        found.objects = "s3://other"  # type: ignore[misc]
    assert "secret" not in repr(found)
