"""A deployed instance in moto: the resources of its stacks, and the parameters that describe them."""

from __future__ import annotations

import io
import itertools
import json
import zipfile
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import boto3
from botocore.stub import Stubber
from moto.emrserverless.models import emrserverless_backends

from dormouse.aws.instance import DeployedInstance, find
from dormouse.settings import resources
from dormouse.settings.resources import (
    CommitResources,
    DatabaseResources,
    Described,
    PauseResources,
    RunResources,
    ScheduledResources,
    StorageResources,
)

REGION = "eu-west-1"
Engine = Literal["emr-serverless", "emr-ec2-steps", "emr-ec2-transient"]


class Session(boto3.session.Session):
    """A session that caches its clients, which are slow to make."""

    @cached_property
    def _clients(self) -> dict[str, Any]:
        return {}

    def client(self, service_name: str, **options: Any) -> Any:  # type: ignore[override]
        if service_name not in self._clients:
            self._clients[service_name] = super().client(service_name, **options)
        return self._clients[service_name]


@cache
def _session() -> Session:
    """Returns the session of all tests, within moto."""
    return Session("key", "secret", region_name=REGION)


@dataclass
class Deployed:
    """The names of the resources of a deployed instance, and clients to inspect them."""

    id: str
    session: Any
    queues: list[str]
    mappings: list[str]
    rules: list[str]
    keeper: str
    cluster: str
    application: str | None
    emr_name: str | None
    machine: str

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def find(self) -> DeployedInstance:
        return find(self.id, self.session)

    def state(self) -> dict[str, Any]:
        """Returns the state of each part that pause and resume switch on or off."""
        rds, events, functions = (self.client(name) for name in ("rds", "events", "lambda"))
        parameter = self.client("ssm").get_parameter(Name=resources.state_parameter(self.id))
        return {
            "desired": parameter["Parameter"]["Value"],
            "database": rds.describe_db_clusters(DBClusterIdentifier=self.cluster)["DBClusters"][0]["Status"],
            "rules": {events.describe_rule(Name=rule)["State"] for rule in self.rules},
            "keeper": events.describe_rule(Name=self.keeper)["State"],
            "mappings": {functions.get_event_source_mapping(UUID=uuid)["State"] for uuid in self.mappings},
            "spark": self.spark(),
        }

    def spark(self) -> str | None:
        if self.application is None:
            listed = self.client("emr").list_clusters()["Clusters"]
            return ",".join(one["Status"]["State"] for one in listed)
        emr = self.client("emr-serverless")
        return str(emr.get_application(applicationId=self.application)["application"]["state"])


PAUSED = {
    "desired": "paused", "database": "stopped", "rules": {"DISABLED"}, "keeper": "ENABLED",
    "mappings": {"Disabled"}, "spark": "STOPPED",
}  # fmt: skip
RUNNING = {
    "desired": "running", "database": "available", "rules": {"ENABLED"}, "keeper": "ENABLED",
    "mappings": {"Enabled"}, "spark": "STARTED",
}  # fmt: skip


def deploy(
    instance_id: str = "dev", *, engine: Engine = "emr-serverless", serverless: bool = True
) -> Deployed:
    """Makes all resources that pause and resume switch on or off, in the running state."""
    session = _session()
    queues, mappings, function = _commit(session, instance_id)
    names = {stack: f"dormouse-{instance_id}-{stack}" for stack in ("garbage", "compaction", "maintenance")}
    keeper = f"dormouse-{instance_id}-keeper"
    for rule in (*names.values(), keeper):
        session.client("events").put_rule(Name=rule, ScheduleExpression="rate(15 minutes)")
    machine = _machine(session, instance_id)
    application = _application(session) if engine == "emr-serverless" else None
    emr_name = None if application else f"dormouse-{instance_id}-compaction"
    cluster = _database(session, instance_id, serverless)
    kind: Literal["serverless", "fixed"] = "serverless" if serverless else "fixed"
    told: dict[str, Described] = {
        "storage": StorageResources(data_bucket="data", payload_bucket="payloads", objects="s3://data/data"),
        "database": DatabaseResources(cluster=cluster, kind=kind, endpoint="db", port=5432, name="dormouse"),
        "commit": CommitResources(
            queues=queues[:2], dead_letters=queues[2:], mappings=mappings, function=function
        ),
        "garbage": ScheduledResources(rules=(names["garbage"],), function="garbage"),
        "compaction": RunResources(
            rules=(names["compaction"],), function="c", state_machine=machine, engine=engine,
            application=application, cluster_name=emr_name,
        ),
        "maintenance": RunResources(rules=(names["maintenance"],), function="m"),
        "pause": PauseResources(rule=keeper, queue="q", function="pause", drain_seconds=60),
    }  # fmt: skip
    ssm = session.client("ssm")
    ssm.put_parameter(Name=resources.state_parameter(instance_id), Value="running", Type="String")
    for stack, one in told.items():
        where = resources.resources_parameter(instance_id, stack)
        ssm.put_parameter(Name=where, Value=one.model_dump_json(), Type="String")
    return Deployed(
        instance_id, session, list(queues[:2]), list(mappings), list(names.values()), keeper, cluster,
        application, emr_name, machine,
    )  # fmt: skip


def _role(session: Any, instance_id: str) -> str:
    iam, name = session.client("iam"), f"role-{instance_id}"
    policy = {"Version": "2012-10-17", "Statement": []}
    return str(iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(policy))["Role"]["Arn"])


def _commit(session: Any, instance_id: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    sqs, functions = session.client("sqs"), session.client("lambda")
    names = [f"{instance_id}-{kind}-{number}" for kind in ("commit", "dead") for number in range(2)]
    queues = tuple(sqs.create_queue(QueueName=name)["QueueUrl"] for name in names)
    function = _function(session, f"{instance_id}-commit", _role(session, instance_id), 120)
    arns = [f"arn:aws:sqs:{REGION}:123456789012:{name}" for name in names[:2]]
    mappings = [
        functions.create_event_source_mapping(EventSourceArn=arn, FunctionName=function)["UUID"]
        for arn in arns
    ]
    return queues, tuple(mappings), function


def _function(session: Any, name: str, role: str, timeout: int) -> str:
    code = io.BytesIO()
    with zipfile.ZipFile(code, "w") as archive:
        archive.writestr("commit.py", "def handler(event, context): return {}")
    made = session.client("lambda").create_function(
        FunctionName=name, Runtime="python3.13", Role=role, Handler="commit.handler",
        Code={"ZipFile": code.getvalue()}, Timeout=timeout,
    )  # fmt: skip
    return str(made["FunctionName"])


def make_function(deployed: Deployed, name: str, timeout: int) -> None:
    """Makes the lambda of a schedule. `deploy` only uses the lambda's name."""
    _function(deployed.session, name, _role(deployed.session, name), timeout)


def _database(session: Any, instance_id: str, serverless: bool) -> str:
    # as CloudFormation names it: with the longest id, the last part is cut off
    rds, name = session.client("rds"), f"dormouse-{instance_id}-database-clustereb0386a7-x1mfb3jkvbwa"[:63]
    more: dict[str, Any] = {"ServerlessV2ScalingConfiguration": {"MinCapacity": 0.5, "MaxCapacity": 4}}
    rds.create_db_cluster(
        DBClusterIdentifier=name, Engine="aurora-postgresql", MasterUsername="owner",
        MasterUserPassword="a password", **(more if serverless else {}),
    )  # fmt: skip
    rds.create_db_instance(
        DBInstanceIdentifier=f"dormouse-{instance_id}-writer", DBClusterIdentifier=name,
        Engine="aurora-postgresql", DBInstanceClass="db.serverless" if serverless else "db.r8g.large",
    )  # fmt: skip
    return name


def _machine(session: Any, instance_id: str) -> str:
    definition = json.dumps({"StartAt": "a", "States": {"a": {"Type": "Wait", "Seconds": 30, "End": True}}})
    made = session.client("stepfunctions").create_state_machine(
        name=f"dormouse-{instance_id}-compaction",
        definition=definition,
        roleArn="arn:aws:iam::123456789012:role/r",
    )
    return str(made["stateMachineArn"])


def _application(session: Any) -> str:
    emr = session.client("emr-serverless")
    made = emr.create_application(name="spark", releaseLabel="emr-6.6.0", type="SPARK")["applicationId"]
    emr.start_application(applicationId=made)
    return str(made)


_tokens = itertools.count()


def start_job_run(deployed: Deployed) -> str:
    """Starts a run of the EMR Serverless application; returns its id."""
    started = deployed.client("emr-serverless").start_job_run(
        applicationId=deployed.application, clientToken=f"token-{next(_tokens)}",
        executionRoleArn="arn:aws:iam::123456789012:role/r",
        jobDriver={"sparkSubmit": {"entryPoint": "s3://data/run.py"}},
    )  # fmt: skip
    emrserverless_backends["123456789012"][REGION].job_runs[str(deployed.application)][-1].state = "RUNNING"
    return str(started["jobRunId"])


def job_run_state(deployed: Deployed, run: str) -> str:
    """Returns the state of a run, as the listing of runs has it.

    Any other call of moto would end the run.
    """
    listed = deployed.client("emr-serverless").list_job_runs(applicationId=deployed.application)["jobRuns"]
    return str(next(one["state"] for one in listed if one["id"] == run))


def receive_request(deployed: Deployed) -> str:
    """Sends a commit request and receives it, like a lambda; returns the receipt handle."""
    functions, sqs, url = deployed.client("lambda"), deployed.client("sqs"), deployed.queues[0]
    functions.update_event_source_mapping(UUID=deployed.mappings[0], Enabled=False)  # moto would invoke it
    sqs.send_message(QueueUrl=url, MessageBody="a request")
    message = sqs.receive_message(QueueUrl=url, VisibilityTimeout=3_600)["Messages"][0]
    functions.update_event_source_mapping(UUID=deployed.mappings[0], Enabled=True)
    return str(message["ReceiptHandle"])


def start_emr_cluster(deployed: Deployed, name: str | None = None) -> str:
    """Starts a cluster of EMR on EC2 that waits for steps; returns its id."""
    started = deployed.client("emr").run_job_flow(
        Name=name or deployed.emr_name, ReleaseLabel="emr-7.0.0", ServiceRole="r", JobFlowRole="r",
        Instances={
            "InstanceCount": 1, "MasterInstanceType": "m7g.xlarge", "KeepJobFlowAliveWhenNoSteps": True,
        },
    )  # fmt: skip
    return str(started["JobFlowId"])


@cache
def _keyed_session() -> Any:
    """Returns a shared session with credentials, which reads the descriptions of services only once."""
    return boto3.session.Session("key", "secret", region_name=REGION)


class StubSession:
    """A session whose clients, one for each service, return given answers."""

    def __init__(self) -> None:
        self._stubs: dict[str, tuple[Any, Stubber]] = {}

    def client(self, service: str, **options: Any) -> Any:
        if service not in self._stubs:
            made = _keyed_session().client(service, **options)
            self._stubs[service] = (made, Stubber(made))
            self._stubs[service][1].activate()
        return self._stubs[service][0]

    def stub(self, service: str) -> Stubber:
        self.client(service)
        return self._stubs[service][1]

    def assert_all_stubs_were_used(self) -> None:
        for _, stub in self._stubs.values():
            stub.assert_no_pending_responses()
