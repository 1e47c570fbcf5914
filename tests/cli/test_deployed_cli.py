"""`dormouse env`, `dead-letters` and `restore-objects`: their output and errors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from moto import mock_aws

from tests.deployed import REGION, Deployed, deploy
from tests.stored import file, ref
from tests.support.commits import AddFiles, encode

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws(config={"lambda": {"use_docker": False}}):
        found = deploy()
        s3 = found.session.client("s3")
        s3.create_bucket(Bucket="data", CreateBucketConfiguration={"LocationConstraint": REGION})
        s3.put_bucket_versioning(Bucket="data", VersioningConfiguration={"Status": "Enabled"})
        yield found


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """Returns a function that runs commands for the instance's region, unless the environment names one."""
    return lambda *args: cli(*args, *(() if "AWS_REGION" in os.environ else ("--region", REGION)))


def test_a_shell_can_evaluate_the_printed_environment(deployed: Deployed, cli: Cli) -> None:
    code, out, err = cli("env", "--instance", "dev", "--role", "dormouse_run")
    assert (code, err) == (0, "")
    script = f'{out}\nprintf "%s\\n" "$DORMOUSE_DSN" "$DORMOUSE_OBJECTS" "$DORMOUSE_COMMIT_QUEUE"'
    lines = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert lines[:3] == [
        f"rds-iam://dormouse_run@db:5432/dormouse?region={REGION}",
        "s3://data/data",
        ",".join(deployed.queues),
    ]
    as_json = json.loads(cli("env", "--instance", "dev", "--json")[1])
    assert as_json["DORMOUSE_DSN"].startswith("rds-iam://dormouse_owner@")


def test_the_region_may_be_in_the_environment(
    deployed: Deployed, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", REGION)
    assert cli("env", "--instance", "dev")[0] == 0
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert cli("env", "--instance", "dev")[0] == 1


@pytest.mark.slow
def test_deleted_objects_are_restored(deployed: Deployed, cli: Cli) -> None:
    s3 = deployed.session.client("s3")
    s3.put_object(Bucket="data", Key="data/1/a", Body=b"a")
    s3.delete_object(Bucket="data", Key="data/1/a")
    restore = ("restore-objects", "--instance", "dev", "--since", "2026-01-01T00:00:00Z")
    code, out, _ = cli(*restore, "--dry-run")
    assert (code, out) == (0, "1 object deleted since 2026-01-01 00:00:00 UTC would be restored\n")
    code, out, err = cli(*restore)
    assert (code, out.endswith(" were restored\n"), "pause" in err) == (0, True, True)
    assert s3.get_object(Bucket="data", Key="data/1/a")["Body"].read() == b"a"


def test_objects_of_a_copy_are_restored_even_while_the_instance_runs(deployed: Deployed, cli: Cli) -> None:
    s3 = deployed.session.client("s3")
    s3.put_object(Bucket="data", Key="copy/1/a", Body=b"a")
    s3.delete_object(Bucket="data", Key="copy/1/a")
    restore = ("restore-objects", "--instance", "dev", "--since", "2026-01-01T00:00:00Z")
    code, out, err = cli(*restore, "--objects", "s3://data/copy")
    assert (code, out.endswith(" were restored\n"), err) == (0, True, "")
    assert s3.get_object(Bucket="data", Key="copy/1/a")["Body"].read() == b"a"


def test_dead_letters_are_shown_and_sent_again_by_one_command(
    deployed: Deployed, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dormouse.aws.renewal.WAIT_SECONDS", 0)
    assert cli("dead-letters", "--instance", "dev")[:2] == (0, "no dead letters\n")
    commit = deployed.find().resources.commit
    assert commit is not None
    good = encode(AddFiles(commit_id="good", table="t", files=(file("a", ref("a")),)), table_id=1)
    for body in (good, "nonsense"):
        deployed.client("sqs").send_message(QueueUrl=commit.dead_letters[0], MessageBody=body)
    code, out, _ = cli("dead-letters", "--instance", "dev", "--send-again")
    assert code == 0 and "1 dead letter of 2 sent again" in out and "cannot be sent" in out
    [left] = json.loads(cli("dead-letters", "--instance", "dev", "--json")[1])
    assert (left["body"], left["can_be_sent"], left["is_sent_again"]) == ("nonsense", False, False)


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("env", "--instance", "none"), 1, "there is dev"),
        (("env", "--instance", "dev", "--role", "x"), 2, "dormouse_owner"),
        (("restore-objects", "--instance", "dev", "--since", "yesterday"), 2, "'yesterday'"),
        (("restore-objects", "--instance", "dev", "--since", "2026-01-01"), 2, "zone"),
        (("restore-objects", "--instance", "dev", "--since", "2126-01-01T00:00:00Z"), 2, "is in the future"),
    ],
)
def test_mistakes_are_one_clear_line(
    args: tuple[str, ...], code: int, word: str, deployed: Deployed, cli: Cli
) -> None:
    found, out, err = cli(*args)
    assert (found, out) == (code, "")
    assert word in err
    assert len(err.strip().splitlines()) == 1
