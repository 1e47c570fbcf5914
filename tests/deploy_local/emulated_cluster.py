"""The emulator's database cluster. It leads to the run's PostgreSQL, and takes time to stop and start.

Its endpoint, its managed secret and its rules for logins are those of AWS. While the cluster is stopped, it
refuses changes.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from ministack.core import iam_evaluator, rds_iam
from ministack.core.responses import new_uuid, request_scope
from ministack.services import rds, secretsmanager
from ministack.services.cloudformation.provisioners import _RESOURCE_HANDLERS as HANDLERS

ACCOUNT, REGION = os.environ["MINISTACK_ACCOUNT_ID"], os.environ["MINISTACK_REGION"]
DATABASE_HOST, DATABASE_PORT = os.environ["DATABASE_HOST"], int(os.environ["DATABASE_PORT"])
TRANSITION_SECONDS = 2.0
"""The time for which a cluster is `stopping` or `starting`."""


def lead_to_the_database() -> None:
    """Makes new clusters refer to the run's PostgreSQL, with a managed secret for the master user."""
    handler = dict(HANDLERS["AWS::RDS::DBCluster"])
    create, update, delete = handler["create"], handler["update"], handler["delete"]

    def created(logical_id: str, props: dict[str, Any], stack: str) -> tuple[str, dict[str, str]]:
        if int(props.get("Port", 0)) != DATABASE_PORT:
            raise ValueError(f"the run's PostgreSQL listens on port {DATABASE_PORT}, not {props.get('Port')}")
        cluster_id, attributes = create(logical_id, props, stack)
        cluster = rds._clusters[cluster_id]
        password = new_uuid()
        secret = secretsmanager.create_secret_in_process(
            f"rds!{cluster['DbClusterResourceId']}",
            json.dumps({"username": cluster["MasterUsername"], "password": password}),
        )
        cluster |= {"_MasterUserPassword": password, "Endpoint": DATABASE_HOST, "Port": DATABASE_PORT}
        cluster["MasterUserSecret"] = {
            "SecretArn": secret,
            "SecretStatus": "active",
            "KmsKeyId": props.get("MasterUserSecret", {}).get("KmsKeyId", ""),
        }
        return cluster_id, attributes | _attributes(cluster)

    def updated(physical_id: str, *arguments: Any, **more: Any) -> tuple[str, dict[str, str]]:
        _check_available(physical_id)
        kept = dict(rds._clusters[physical_id])
        cluster_id, attributes = update(physical_id, *arguments, **more)
        cluster = rds._clusters[cluster_id]
        cluster |= {key: kept[key] for key in ("Endpoint", "Port", "_MasterUserPassword", "MasterUserSecret")}
        return cluster_id, attributes | _attributes(cluster)

    def deleted(physical_id: str, props: dict[str, Any]) -> None:
        if cluster := rds._clusters.get(physical_id):
            secretsmanager.delete_secret_in_process(cluster["MasterUserSecret"]["SecretArn"])
        delete(physical_id, props)

    instance = dict(HANDLERS["AWS::RDS::DBInstance"])
    change = instance["update"]

    def changed(physical_id: str, old: dict[str, Any], new: dict[str, Any], *rest: Any, **more: Any) -> Any:
        _check_available(new["DBClusterIdentifier"])
        return change(physical_id, old, new, *rest, **more)

    group = dict(HANDLERS["AWS::RDS::DBClusterParameterGroup"])
    regroup = group["update"]

    def regrouped(physical_id: str, *arguments: Any, **more: Any) -> Any:
        for cluster_id, cluster in rds._clusters.items():
            if cluster.get("DBClusterParameterGroup") == physical_id:
                _check_available(cluster_id)
        return regroup(physical_id, *arguments, **more)

    HANDLERS["AWS::RDS::DBClusterParameterGroup"] = group | {"update": regrouped}
    HANDLERS["AWS::RDS::DBInstance"] = instance | {"update": changed}
    HANDLERS["AWS::RDS::DBCluster"] = handler | {"create": created, "update": updated, "delete": deleted}


def _check_available(cluster_id: str) -> None:
    """Raises ValueError if the cluster is stopped, because RDS then refuses to modify it, even its tags."""
    if (status := rds._clusters[cluster_id]["Status"]) != "available":
        raise ValueError(f"InvalidDBClusterStateFault: the DB cluster {cluster_id} is {status}")


def _attributes(cluster: dict[str, Any]) -> dict[str, str]:
    return {
        "Endpoint.Address": DATABASE_HOST,
        "Endpoint.Port": str(DATABASE_PORT),
        "ReadEndpoint.Address": DATABASE_HOST,
        "MasterUserSecret.SecretArn": cluster["MasterUserSecret"]["SecretArn"],
    }


def take_time_to_stop_and_start() -> None:
    """Delays the end of a stop or start by TRANSITION_SECONDS. AWS needs minutes."""
    for action, on_the_way in (("StopDBCluster", "stopping"), ("StartDBCluster", "starting")):
        rds._ACTION_MAP[action] = _slowly(rds._ACTION_MAP[action], on_the_way)


def _slowly(change: Any, on_the_way: str) -> Any:
    def changed(parameters: dict[str, Any]) -> Any:
        answer = change(parameters)
        cluster = rds._resolve_cluster_in_request_region(rds._p(parameters, "DBClusterIdentifier"))
        if answer[0] == 200 and cluster:
            final = cluster["Status"]
            cluster["Status"] = on_the_way
            threading.Timer(TRANSITION_SECONDS, lambda: cluster.update(Status=final)).start()
        return answer

    return changed


def _cluster() -> dict[str, Any] | None:
    return next(iter(rds._clusters.values()), None)


def refusal(user: str, token: str) -> str | None:
    """Returns why IAM refuses a login as this user with this token, or None if it is allowed."""
    with request_scope(ACCOUNT, REGION):
        cluster = _cluster()
        if cluster is None or not cluster["IAMDatabaseAuthenticationEnabled"]:
            return "no cluster with IAM authentication"
        verified = rds_iam.verify_rds_iam_token(
            token,
            hostname=DATABASE_HOST,
            port=DATABASE_PORT,
            db_user=user,
            region=REGION,
            account_id=ACCOUNT,
        )
        if isinstance(verified, rds_iam.RdsIamTokenError):
            return verified.code
        principal = iam_evaluator.resolve_principal(verified.access_key_id, ACCOUNT)
        if isinstance(principal, iam_evaluator.AuthError):
            return "unknown principal"
        if principal.policies is None:
            return None  # the account itself
        resource = f"arn:aws:rds-db:{REGION}:{ACCOUNT}:dbuser:{cluster['DbClusterResourceId']}/{user}"
        request = iam_evaluator.EvalContext(
            principal_arn=principal.arn,
            principal_type=principal.type,
            principal_account=ACCOUNT,
            action="rds-db:connect",
            resource_arn=resource,
            region=REGION,
            principal_keys=principal.keys,
        )
        decision = iam_evaluator.evaluate(request, principal.policies, *principal.limits).decision
        return None if decision == "Allow" else f"{principal.arn} may not rds-db:connect {resource}"


def described() -> dict[str, Any]:
    """Returns the facts about the cluster that the run's PostgreSQL needs; all are None without a cluster."""
    with request_scope(ACCOUNT, REGION):
        cluster = _cluster() or {}
        names = ("Status", "MasterUsername", "_MasterUserPassword", "DatabaseName")
        return {name.strip("_"): cluster.get(name) for name in names}
