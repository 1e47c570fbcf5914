"""The properties of the last release's templates that must not change.

`python -m tests.infrastructure.released` writes them into `frozen/released.json` at each release. They are
the properties that CloudFormation cannot change without replacing the resource. The file has them for each
resource that holds data, and for the resources that these properties refer to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.infrastructure.reviewed import reviewed

STATEFUL = {
    "AWS::Backup::BackupVault",
    "AWS::EC2::Subnet",
    "AWS::EC2::VPC",
    "AWS::KMS::Key",
    "AWS::Logs::LogGroup",
    "AWS::RDS::DBCluster",
    "AWS::RDS::DBInstance",
    "AWS::Route53::HostedZone",
    "AWS::S3::Bucket",
    "AWS::SNS::Topic",
    "AWS::SQS::Queue",
    "AWS::SSM::Parameter",
    "AWS::SecretsManager::Secret",
}
CHANGED_IN_PLACE = {
    "AWS::RDS::DBInstance": {
        "AutoMinorVersionUpgrade",
        "BackupRetentionPeriod",
        "DBParameterGroupName",
        "MultiAZ",
        "PreferredMaintenanceWindow",
    }
}
"""Properties that AWS's schemas list as replacing the resource, but which our instances change in place.

By type of resource.
"""

CONFIGURATIONS = ("dev", "minimal", "prod", "copied")
"""Names of configurations. `copied` has only resources that backups, copies and the audit add."""

FILE = Path(__file__).parent / "frozen/released.json"
Held = dict[str, dict[str, Any]]
"""The type of each resource and its properties that must not change, by `stack/logical id`."""


def held(templates: Mapping[str, Any]) -> Held:
    """Returns the properties that must not change, of all resources that hold data.

    Includes the resources to which these properties refer. Leaves out facts, which each deployment reads
    again.
    """
    found: Held = {}
    for stack, template in templates.items():
        resources = template.get("Resources", {})
        left = [name for name, body in resources.items() if body["Type"] in STATEFUL and name[:5] != "Facts"]
        while left:
            name = left.pop()
            if f"{stack}/{name}" in found:
                continue
            body = resources[name]
            given = body.get("Properties", {})
            fixed = {key: given[key] for key in _fixed(body["Type"]) & given.keys()}
            found[f"{stack}/{name}"] = {"Type": body["Type"], **dict(sorted(fixed.items()))}
            left += [one for one in _references(fixed) if one in resources]
    return dict(sorted(found.items()))


def replaced(before: Held, after: Held) -> list[str]:
    """Returns a line for each missing resource, and for each changed property that replaces a resource."""
    lines = [f"{name} is missing" for name in before.keys() - after.keys()]
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        lines += [f"{name}: {key}" for key in was.keys() | now.keys() if was.get(key) != now.get(key)]
    return sorted(lines)


def _fixed(kind: str) -> set[str]:
    """Returns the properties of a type of resource whose change replaces the resource.

    They come from AWS's schemas in cfn-lint; empty for custom resources.
    """
    from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

    if "::" not in kind or kind.startswith("Custom::"):
        return set()
    schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema
    keys = ("createOnlyProperties", "conditionalCreateOnlyProperties")
    paths = [path for key in keys for path in schema.get(key) or ()]
    return {path.split("/")[2] for path in paths} - CHANGED_IN_PLACE.get(kind, set())


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(name := value.get("Ref"), str):
            yield name
        elif isinstance(pair := value.get("Fn::GetAtt"), list):
            yield str(pair[0])
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _references(one)


def main() -> None:
    """Writes `frozen/released.json` from the reviewed templates, which are stored as snapshots."""
    texts = []
    for one in CONFIGURATIONS:
        lines = [f'  "{key}": {json.dumps(fixed)}' for key, fixed in held(reviewed(one)).items()]
        texts.append(f' "{one}": {{\n' + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
