"""Steps of a run: tables, ingests, schedules, migrations, pauses and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager

import pyarrow as pa

from dormouse.aws.switches import rule_name
from dormouse.settings.resources import Resources, stack_name
from tests.commits import add
from tests.deploy_local import access, demo
from tests.deploy_local.account import Account, Person
from tests.deploy_local.cloud import Cloud
from tests.deploy_local.commits import wait, wait_for
from tests.deploy_local.packages import migration_folders
from tests.deploy_local.processes import RunFailed, sign
from tests.stored import live
from tests.support.api import Instance

INGESTS = 13
"""The number of ingests. It is larger than the number of files that one compaction takes."""

ROWS = 1_000
MEANWHILE = 50
PAUSED = "the instance is paused, and AWS cannot change a stopped database"
STARTED_BY_AWS = "RDS-EVENT-0153"
Opened = Callable[[], AbstractContextManager[Instance]]


def ingest(instance: Instance) -> None:
    """Ingests rows through the queue, so that the deployed lambda commits them, and checks the result."""
    table = instance.table("events")
    for number in range(INGESTS):
        keys = range(number, ROWS * INGESTS, INGESTS)
        table.ingest(pa.table({"key": pa.array(keys, pa.int64()), "value": pa.array(keys, pa.int64())}))
    matches = table.query(where={"key": 7}).read_all().num_rows
    rows = sum(reference.row_count for reference in table.files.file_references())
    if (matches, rows) != (1, ROWS * INGESTS):
        raise RunFailed(f"table events has {rows} rows, and {matches} of one key: not those ingested")


def ask_for_tables(account: Account, instance: Instance, operator: Person) -> str:
    """Runs `dormouse table --instance`. Lambdas do its work, so it needs no connection to the database."""

    def table(verb: str, *more: str) -> str:
        return account.dormouse("table", verb, "asked", *more, "--instance", account.instance_id, **operator)

    table("create", "--row-key", "carrier:string", "--value", "delay:long?", "--split-point", "M")
    table("set", "gc_delay_seconds=60")
    shown, made = json.loads(table("show", "--json")), instance.table("asked")
    if (leaves := len(shown["leaf_partitions"])) != 2 or shown["schema"] != made.schema.to_json():
        raise RunFailed(f"the table that was made is shown with {leaves} partitions and {shown['schema']}")
    if {shown["properties"]["gc_delay_seconds"], made.properties.gc_delay_seconds} != {60.0}:
        raise RunFailed(f"gc_delay_seconds was set to 60, and is shown with {shown['properties']}")
    table("drop", "--yes")
    if "asked" in (names := [one.name for one in instance.tables()]):
        raise RunFailed(f"the table that was dropped is among {', '.join(names)}")
    return "made, shown, set, dropped"


def compact_by_state_machine(account: Account, opened: Opened, resources: Resources) -> str:
    """Runs what the compaction schedule starts, which makes jobs and one run of EMR for them.

    The instance is closed meanwhile. At the end, no job may be open. In the emulator no Spark runs, so the
    jobs are released. Elsewhere the table must have fewer files, and the same rows.
    """
    compaction = resources.compaction
    assert compaction is not None and compaction.state_machine is not None
    states, emr = account.client("stepfunctions"), account.client("emr-serverless")
    machine, application = compaction.state_machine, compaction.application
    before, files = states.list_executions(stateMachineArn=machine)["executions"], _references(opened)
    account.fire(compaction)

    def last() -> str:
        executions = states.list_executions(stateMachineArn=machine)["executions"]
        return str(executions[0]["status"]) if len(executions) > len(before) else "not started"

    wait_for(account, lambda: "" if last() not in ("RUNNING", "not started") else f"a run that is {last()}")
    runs = emr.list_job_runs(applicationId=application)["jobRuns"]
    if len(runs) != 1 or last() != "SUCCEEDED":
        raise RunFailed(f"EMR was given {len(runs)} runs, not one; the state machine says {last()}")
    run = emr.get_job_run(applicationId=application, jobRunId=runs[0]["id"])["jobRun"]
    arguments = run["jobDriver"]["sparkSubmit"]["entryPointArguments"]
    if not any(str(one).startswith("s3://") and str(one).endswith(".json") for one in arguments):
        raise RunFailed(f"the run of EMR has no list of its jobs among {arguments}")
    after = _references(opened)
    if held := [job for _, _, _, job in after if job is not None]:
        raise RunFailed(f"{len(held)} references are still of jobs whose run is over")
    if len(after) >= len(files) and not account.is_emulated:
        raise RunFailed(f"EMR compacted nothing: {len(files)} references before, {len(after)} after")
    if (rows := sum(count for _, _, count, _ in after)) != sum(count for _, _, count, _ in files):
        raise RunFailed(f"the table has {rows} rows after the compaction, not those before")
    return f"one run, {run['name']}, {run['state']}; {len(files)} references before, {len(after)} after"


def _references(opened: Opened) -> list[tuple[str, str, int, str | None]]:
    with opened() as instance:
        return live(instance.table(demo.TABLE).files)


def collect_garbage(account: Account, instance: Instance, resources: Resources) -> str:
    """Compacts a table, and checks that the schedule deletes the objects of the replaced files."""
    assert resources.garbage is not None
    table = instance.table("events")
    before = {name for _, name, _, _ in live(table.files)}
    table.compact()
    replaced = before - {name for _, name, _, _ in live(table.files)}
    if not replaced:
        raise RunFailed("the compaction of table events replaced nothing")
    account.fire(resources.garbage)

    def left() -> str:
        kept = replaced & {name for name, _ in instance._objects.list("")}
        return f"{len(kept)} objects of {len(replaced)} replaced files" if kept else ""

    wait_for(account, left)
    return f"{len(replaced)} objects deleted"


def fail_to_migrate(cloud: Cloud) -> str:
    """Deploys two migrations, of which the second fails.

    CloudFormation must roll back. The older code then meets the first migration's schema. It must not fail,
    and must log which schema the database has. All later steps run with the newer schema.
    """
    folders, name = migration_folders(cloud.work / "checkout"), stack_name("local", "migrate")
    known = len(list(folders[0].glob("*.sql")))
    good, bad = f"{known + 1:04d}_of_tomorrow", f"{known + 2:04d}_that_fails"
    new = [(folder / f"{one}.sql", text) for folder in folders for one, text in ((good, "1"), (bad, "1 / 0"))]
    for path, text in new:
        path.write_text(f"select {text};\n")
    given = ("--exclusively", *cloud.app, "--require-approval", "never")
    _, said = cloud.cdk("deploy", name, *given, accept=(1,))
    for path, _ in new:
        path.unlink()
    (stack,) = cloud.client("cloudformation").describe_stacks(StackName=name)["Stacks"]
    if (status := stack["StackStatus"]) != "UPDATE_ROLLBACK_COMPLETE" or bad not in said:
        raise RunFailed(f"the stack {name} is {status}, and the CDK says about {bad}: {sign(said)}")
    logs = cloud.client("logs")

    def unlogged() -> str:
        groups = [one["logGroupName"] for one in logs.describe_log_groups()["logGroups"]]
        lines = [
            line["message"] for group in groups if name in group
            for line in logs.filter_log_events(logGroupName=group)["events"]
        ]  # fmt: skip
        is_logged = any(f"the database has migration {good}" in line for line in lines)
        return "" if is_logged else f"no line among {len(lines)} that says which schema the database has"

    wait_for(cloud, unlogged)
    return f"rolled back, with {good} applied"


def pause(account: Account, resources: Resources, operator: Person) -> str:
    """Pauses the instance by the command; checks that nothing runs then, and that a second pause does
    nothing.
    """
    of = ("--instance", account.instance_id)
    account.dormouse("pause", *of, "--wait", **operator)
    if awake := still_awake(account, resources):
        raise RunFailed(f"after dormouse pause, {awake}")
    if "the host for access is stopped: run dormouse resume" not in (
        printed := account.dormouse("access", *of, accept=(1,), **operator)
    ):
        raise RunFailed(f"for a paused instance, dormouse access says: {sign(printed)}")
    said = json.loads(account.dormouse("pause", *of, "--wait", "--json", **operator))
    if undone := [step["step"] for step in said["steps"] if step["outcome"] == "done"][:-1]:
        raise RunFailed(f"a second dormouse pause still did: {', '.join(undone)}")
    return "schedules and queues off, database stopped"


def still_awake(account: Account, resources: Resources) -> str:
    """Returns a description of a part of the instance that is not paused, or an empty string."""
    events, functions, rds = account.client("events"), account.client("lambda"), account.client("rds")
    assert resources.commit is not None and resources.database is not None
    for part in (resources.garbage, resources.compaction, resources.maintenance):
        for rule in part.rules if part else ():
            if events.describe_rule(Name=rule_name(rule))["State"] != "DISABLED":
                return f"the rule {rule} is enabled"
    for mapping in resources.commit.mappings:
        if (state := functions.get_event_source_mapping(UUID=mapping)["State"]) != "Disabled":
            return f"the mapping {mapping} is {state}"
    for what, count in running_parts(account).items():
        if count:
            return f"{count} {what} are there"
    if wrong := access.wrong_resources(account):
        return wrong
    (cluster,) = rds.describe_db_clusters(DBClusterIdentifier=resources.database.cluster)["DBClusters"]
    return "" if cluster["Status"] == "stopped" else f"the database is {cluster['Status']}"


RUNNING_PARTS = {"load balancers": 1, "interface endpoints": 6, "services": 1, "records": 1, "hosts": 1}
"""The parts of the query service and the host for access that exist only while the instance runs."""


def running_parts(account: Account) -> dict[str, int]:
    """Returns the number of existing parts, for each kind in RUNNING_PARTS.

    Nothing but the instance is in an emulated account. In a real one, only the hosts are counted.
    """
    hosts = {"hosts": len(access.hosts(account))}
    if not account.is_emulated:
        return hosts
    ecs, names = account.client("ecs"), account.client("route53")
    endpoints = account.client("ec2").describe_vpc_endpoints()["VpcEndpoints"]
    services = [
        arn for cluster in ecs.list_clusters()["clusterArns"]
        for arn in ecs.list_services(cluster=cluster)["serviceArns"]
    ]  # fmt: skip
    records = [
        record for zone in names.list_hosted_zones()["HostedZones"]
        for record in names.list_resource_record_sets(HostedZoneId=zone["Id"])["ResourceRecordSets"]
        if record["Type"] == "A"
    ]  # fmt: skip
    return {
        "load balancers": len(account.client("elbv2").describe_load_balancers()["LoadBalancers"]),
        "interface endpoints": sum(one["VpcEndpointType"] == "Interface" for one in endpoints),
        "services": len(services),
        "records": len(records),
        **hosts,
    }


def deploy_meanwhile(cloud: Cloud, resources: Resources) -> str:
    """Deploys all stacks with another tag while the instance is paused.

    The stack of the database is refused, because AWS changes no stopped database. The others write schedules
    and mappings again. These must stay disabled, because the desired state is a pause. The CDK CLI keeps the
    values of the parameters that put parts to sleep.
    """
    with (cloud.work / "local.toml").open("a") as settings:
        settings.write('\n[tags]\nteam = "meanwhile"\n')
    given = ("--force", "--require-approval", "never")
    _, said = cloud.cdk("deploy", "--all", *cloud.app, *given, accept=(1,))
    formation, database = cloud.client("cloudformation"), stack_name("local", "database")
    (stack,) = formation.describe_stacks(StackName=database)["Stacks"]
    if stack["StackStatus"] != "UPDATE_ROLLBACK_COMPLETE" or PAUSED not in said:
        raise RunFailed(f"the stack {database} is {stack['StackStatus']}, and the CDK says: {sign(said)}")
    known = (one["StackName"] for one in formation.describe_stacks()["Stacks"])
    others = [one for one in known if one not in ("CDKToolkit", database)]
    cloud.cdk("deploy", *others, "--exclusively", *cloud.synthesized, *given)
    if awake := still_awake(cloud, resources):
        raise RunFailed(f"after cdk deploy, {awake}")
    return "the database's stack is refused, the others are asleep as before"


def deploy_awake(cloud: Cloud) -> None:
    """Deploys the stack that was refused during the pause."""
    name = stack_name("local", "database")
    cloud.cdk("deploy", name, "--exclusively", *cloud.synthesized, "--require-approval", "never")
    (stack,) = cloud.client("cloudformation").describe_stacks(StackName=name)["Stacks"]
    tags = {one["Key"]: one["Value"] for one in stack["Tags"]}
    if stack["StackStatus"] != "UPDATE_COMPLETE" or tags.get("team") != "meanwhile":
        raise RunFailed(f"the stack {name} is {stack['StackStatus']} with the tags {tags}")


def half_pause(cloud: Cloud, resources: Resources) -> str:
    """Makes the state that a killed pause leaves; checks that the hourly schedule completes the pause."""
    assert resources.pause is not None and resources.commit is not None and resources.garbage is not None
    cloud.client("rds").start_db_cluster(DBClusterIdentifier=resources.database.cluster)  # type: ignore[union-attr]
    cloud.client("events").enable_rule(Name=rule_name(resources.garbage.rules[0]))
    cloud.client("lambda").update_event_source_mapping(UUID=resources.commit.mappings[0], Enabled=True)
    cloud.ask("/schedule", rule=rule_name(resources.pause.rule))
    wait(cloud, lambda: still_awake(cloud, resources))
    return "asleep again"


def send_meanwhile(account: Account, bodies: list[str], resources: Resources) -> str:
    """Sends messages to a paused instance. They must stay in the queues, and schedules must do nothing."""
    assert resources.commit is not None and resources.garbage is not None
    sqs = account.client("sqs")
    for number, body in enumerate(bodies):
        queues = resources.commit.queues
        sqs.send_message(QueueUrl=queues[number % len(queues)], MessageBody=body)
    account.fire(resources.garbage)
    # The pause lambda may hold some of them now, to send old messages again.
    counts = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]

    def missing() -> str:
        kept = 0
        for url in resources.commit.queues if resources.commit else ():
            attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=counts)["Attributes"]
            kept += sum(int(attributes[count]) for count in counts)
        return "" if kept == len(bodies) else f"a count of {kept} messages, and {len(bodies)} were sent"

    wait_for(account, missing)  # AWS counts messages with a delay
    return f"{len(bodies)} messages kept"


def start_as_aws_does(cloud: Cloud, resources: Resources) -> str:
    """Starts the stopped database, like AWS after seven days. The pause lambda must stop it again.

    The event reaches the lambda through the rule and the queue.
    """
    assert resources.database is not None
    rds, name = cloud.client("rds"), resources.database.cluster
    (cluster,) = rds.describe_db_clusters(DBClusterIdentifier=name)["DBClusters"]
    rds.start_db_cluster(DBClusterIdentifier=name)
    detail = {
        "EventCategories": ["notification"],
        "SourceType": "CLUSTER",
        "SourceArn": cluster["DBClusterArn"],
        "SourceIdentifier": name,
        "EventID": STARTED_BY_AWS,
        "Message": "DB cluster is being started due to it exceeding the maximum allowed time being stopped.",
    }
    event = {
        "Source": "aws.rds",
        "DetailType": "RDS DB Cluster Event",
        "Resources": [cluster["DBClusterArn"]],
        "Detail": json.dumps(detail),
    }
    if cloud.ask("/event", **event)["refused"]:
        raise RunFailed("the emulator does not take the event of the start")
    wait(cloud, lambda: still_awake(cloud, resources))
    return "stopped again"


def resume(account: Account, resources: Resources, operator: Person) -> str:
    """Resumes the instance by the command; checks that everything runs then."""
    account.dormouse("resume", "--instance", account.instance_id, "--wait", **operator)
    wanted = RUNNING_PARTS if account.is_emulated else {"hosts": 1}
    if (parts := running_parts(account)) != wanted:
        raise RunFailed(f"after dormouse resume, there are {parts}, not {wanted}")
    if wrong := access.wrong_resources(account):
        raise RunFailed(f"after dormouse resume, {wrong}")
    assert resources.database is not None
    (cluster,) = account.client("rds").describe_db_clusters(DBClusterIdentifier=resources.database.cluster)[
        "DBClusters"
    ]
    if cluster["Status"] != "available":
        raise RunFailed(f"after dormouse resume, the database is {cluster['Status']}")
    return "everything runs"


def check_newest_image(cloud: Cloud, image: str) -> str:
    """Checks that a resume made the host of the newest image, which was published during the pause."""
    (host,) = access.hosts(cloud)
    if host["ImageId"] != image:
        raise RunFailed(f"the host is made of {host['ImageId']}, and the newest is {image}")
    return image


def wait_for_meanwhile(account: Account, instance: Instance, commit_ids: list[str]) -> str:
    """Waits until the messages that were sent during the pause are processed."""

    def left() -> str:
        waiting = [status for status in instance.commits.statuses(commit_ids) if status.state != "applied"]
        return f"{len(waiting)} commits, like {waiting[0]}" if waiting else ""

    wait(account, left)
    return f"{len(commit_ids)} messages processed"


def bodies_meanwhile(instance: Instance) -> tuple[list[str], list[str]]:
    """Returns encoded commit requests and their ids.

    The database must run, because it has the table's id.
    """
    from tests.support.commits import encode

    requests = [add("parts", f"meanwhile-{number}") for number in range(MEANWHILE)]
    table_id = instance.table("parts").files.table.table_id
    return [encode(one, table_id=table_id) for one in requests], [one.commit_id for one in requests]
