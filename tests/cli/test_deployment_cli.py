"""`dormouse cost`, `doctor` and `destroy`: output, changes, exit codes and `--json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dormouse.aws import destroy as destruction
from dormouse.aws.destroy import Doomed, destroy, doomed
from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings.deployment import DeploymentSettings
from tests.support.aws import Aws
from tests.support.settings import parse

REGION = "eu-west-1"
CONFIG = Path(__file__).parents[2] / "config"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        yield


def dev(**more: Any) -> DeploymentSettings:
    return parse({"id": "dev", **more})


def stack(instance: str = "dev") -> str:
    """Deploys a stack with a bucket that has several versions of an object; returns the bucket's name."""
    template = {
        "Resources": {
            "Data": {
                "Type": "AWS::S3::Bucket",
                "Properties": {"VersioningConfiguration": {"Status": "Enabled"}},
            },
        }
    }
    client = boto3.client("cloudformation", region_name=REGION)
    client.create_stack(
        StackName=f"dormouse-{instance}-storage",
        TemplateBody=json.dumps(template),
        Tags=[{"Key": "dormouse:instance", "Value": instance}],
    )
    found = client.describe_stack_resource(StackName=f"dormouse-{instance}-storage", LogicalResourceId="Data")
    bucket = str(found["StackResourceDetail"]["PhysicalResourceId"])
    s3 = boto3.client("s3", region_name=REGION)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"1", b"2"):
        s3.put_object(Bucket=bucket, Key="a", Body=body)
    s3.delete_object(Bucket=bucket, Key="a")
    return bucket


def session() -> Any:
    return boto3.session.Session(region_name=REGION)


def test_cost_prints_a_table_or_json_and_needs_no_credentials(cli: Cli) -> None:
    code, out, err = cli("cost", "--config", str(CONFIG / "prod.toml"), "--region", REGION)
    assert (code, err) == (0, "")
    assert all(
        word in out
        for word in ("┃ part ", "Aurora, 2 × db.r8g.xlarge", "█", "run_hours 60", "Prices as of 20")
    )
    code, out, _ = cli(
        "cost", "--config", str(CONFIG / "dev.toml"), "--region", REGION, "--json", "--awake", "0"
    )
    found = json.loads(out)
    assert (code, found["assumptions"]["awake"]) == (0, 0.0)
    assert (
        0 < found["usd_month"]["paused"] < found["usd_month"]["auto_paused"] < found["usd_month"]["running"]
    )


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({}, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-west-2"),
        ({"AWS_DEFAULT_REGION": "eu-west-2", "AWS_REGION": "eu-central-1"}, "eu-central-1"),
    ],
)
def test_cost_uses_the_region_of_the_environment(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], region: str
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = cli("cost", "--config", str(CONFIG / "prod.toml"), "--json")
    assert (code, json.loads(out)["region"], err) == (0, region, "")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--config", "no.toml"), "there is no file no.toml"),
        (
            ("--config", str(CONFIG / "dev.toml"), "--region", "mars-1"),
            "the prices of the region mars-1 are not known",
        ),
        (("--config", str(CONFIG / "dev.toml"), "--region", REGION, "--load", "2"), "load = 2"),
        ((), "--config"),
    ],
)
def test_bad_usage_is_one_line(cli: Cli, args: tuple[str, ...], word: str) -> None:
    code, out, err = cli("cost", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert word in err


def test_each_problem_of_a_settings_file_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('id = "D"\nzoo = 1\n')
    for command in ("cost", "doctor", "destroy"):
        code, out, err = cli(command, "--config", "bad.toml")
        assert (code, out, err.count("\n")) == (2, "", 2)
        code, out, err = cli(command, "--config", "bad.toml", "--json")
        assert (code, out, json.loads(err)["exit_code"]) == (2, "", 2)
        assert "zoo" in json.loads(err)["message"]


def test_destroying_a_protected_instance_is_refused_with_a_remedy(cli: Cli, moto: None) -> None:
    bucket = stack("prod")
    code, out, err = cli("destroy", "--config", str(CONFIG / "prod.toml"), "--yes")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "Set protected = false in its file, run cdk deploy --all, then destroy it again" in err
    assert destruction._count(Aws(session()), bucket) == 3


def test_destroying_an_instance_deployed_as_protected_is_refused(
    moto: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack()
    boto3.client("rds", region_name=REGION).create_db_cluster(
        DBClusterIdentifier="kept", Engine="aurora-postgresql", MasterUsername="u",
        MasterUserPassword="password1", DeletionProtection=True,
    )  # fmt: skip
    cluster = {"ResourceType": "AWS::RDS::DBCluster", "PhysicalResourceId": "kept"}
    monkeypatch.setattr(destruction, "_stack_resources", lambda *_: [cluster])
    with pytest.raises(InvalidInput, match=r"as deployed it is protected \(kept\)\. Set protected = false"):
        doomed(dev(), session())


def test_an_instance_that_does_not_exist_is_one_line(cli: Cli, moto: None) -> None:
    stack("devil")
    code, out, err = cli("destroy", "--config", str(CONFIG / "dev.toml"), "--yes")
    where = f"account 123456789012, {REGION}"
    assert (code, out) == (1, "")
    assert err == f"dormouse: there is no instance 'dev' in {where}: nothing was deleted\n"


def test_a_dry_run_lists_what_would_be_deleted_and_deletes_nothing(cli: Cli, moto: None) -> None:
    bucket = stack()
    code, out, _ = cli("destroy", "--config", str(CONFIG / "dev.toml"), "--dry-run")
    assert code == 0
    first = "· disable the schedules: nothing to do"
    assert all(word in out for word in ("dormouse-dev-storage", f"{bucket}: 3 objects", first))
    code, out, _ = cli("destroy", "--config", str(CONFIG / "dev.toml"), "--dry-run", "--json")
    assert json.loads(out)["buckets"] == [{"name": bucket, "objects": 3}]
    assert destruction._count(Aws(session()), bucket) == 3


def test_destroy_needs_yes_without_a_terminal(cli: Cli, moto: None, checkout: Path) -> None:
    stack()
    code, _, err = cli("destroy", "--config", str(CONFIG / "dev.toml"))
    assert (code, err.count("\n")) == (2, 1)
    assert "give --yes to destroy dev" in err


def test_destroy_outside_of_the_checkout_deletes_nothing(cli: Cli, moto: None) -> None:
    bucket = stack()
    code, _, err = cli("destroy", "--config", str(CONFIG / "dev.toml"), "--yes")
    assert (code, err.count("\n")) == (1, 1)
    assert destruction._count(Aws(session()), bucket) == 3


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder like a checkout, with a CDK command that fails at the first call and then succeeds."""
    for name in ("package.json", "app.py", "node_modules/.bin/cdk"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    script = tmp_path / "cdk"
    script.write_text('#!/bin/sh\necho "$AWS_REGION $@" >> called\n[ $(wc -l < called) -gt 1 ]\n')
    script.chmod(0o755)
    monkeypatch.setattr(destruction, "CDK", (str(script),))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_destroy_empties_the_buckets_and_retries_the_cdk(moto: None, checkout: Path) -> None:
    bucket = stack()
    found = doomed(dev(), session())
    assert isinstance(found, Doomed)
    with pytest.raises(InstanceError, match="dormouse-dev-storage"):  # this CDK deletes nothing
        destroy(found, CONFIG / "dev.toml", session(), tell=lambda _: None, root=checkout)
    assert destruction._count(Aws(session()), bucket) == 0
    first, second = (checkout / "called").read_text().splitlines()
    assert (
        first == second == f"{REGION} destroy --all --force -c config={CONFIG / 'dev.toml'} -c packages=none"
    )


@pytest.mark.slow
def test_a_cdk_that_keeps_failing_is_one_line(moto: None, checkout: Path) -> None:
    stack()
    (checkout / "cdk").write_text("#!/bin/sh\nexit 3\n")
    found = doomed(dev(), session())
    assert found is not None
    with pytest.raises(InstanceError, match=r"cdk destroy failed \(3\)"):
        destroy(found, CONFIG / "dev.toml", session(), tell=lambda _: None, root=checkout)


def test_another_account_is_refused(moto: None) -> None:
    stack()
    with pytest.raises(
        InvalidInput, match="the credentials are of the account 123456789012, not 999999999999"
    ):
        doomed(dev(account="999999999999", region=REGION), session())
