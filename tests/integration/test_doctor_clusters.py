"""The doctor names database clusters that an instance no longer uses."""

from __future__ import annotations

import boto3
from moto import mock_aws

from dormouse.settings.resources import DatabaseResources, resources_parameter
from tests.integration.test_doctor import REGION, account, results


@mock_aws
def test_clusters_that_a_restore_has_replaced_are_named() -> None:
    session = boto3.session.Session(region_name=REGION)
    ssm, rds = session.client("ssm"), session.client("rds")

    def made(name: str, instance: str) -> str:
        given = {"MasterUsername": "a", "MasterUserPassword": "secret-secret"}
        tags = [{"Key": "dormouse:instance", "Value": instance}]
        cluster = rds.create_db_cluster(
            DBClusterIdentifier=name, Engine="aurora-postgresql", Tags=tags, **given
        )
        return str(cluster["DBCluster"]["Endpoint"])

    subject = account(session)
    assert results(subject._other_clusters()) == []
    rows = made("rows-of-it", "dev")
    made("the-database", "dev")
    made("of-another", "prod")
    told = DatabaseResources(
        cluster="the-database",
        kind="serverless",
        endpoint="db",
        port=5433,
        name="dormouse",
        row_indexes=(f"{rows}:5433/rows",),
    )
    where = resources_parameter("dev", "database")
    ssm.put_parameter(Name=where, Value=told.model_dump_json(), Type="String")
    assert results(subject._other_clusters()) == [("other clusters", "ok")]
    made("the-former", "dev")
    (check,) = dict(subject._looks())["other clusters"]()
    assert check.result == "warning" and check.found.startswith("the-former, which the instance no longer")
