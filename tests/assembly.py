"""The output of the CDK app, for tests: configurations, and templates as dictionaries."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dormouse.settings.config_file import load, parse
from dormouse.settings.deployment import DeploymentSettings

if TYPE_CHECKING:
    import aws_cdk as cdk

ROOT = Path(__file__).parents[1]


def settings(name: str, **changes: Any) -> DeploymentSettings:
    """Returns the settings of a file of config/, with some of its tables replaced; None removes a table."""
    content = tomllib.loads((ROOT / "config" / f"{name}.toml").read_text("utf-8")) | changes
    return parse({key: value for key, value in content.items() if value is not None})


def file(name: str) -> Callable[[], DeploymentSettings]:
    return lambda: load(ROOT / "config" / f"{name}.toml")


EXISTING_VPC = {
    "vpc_id": "vpc-0123456789abcdef0",
    "subnet_ids": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"],
    "availability_zones": ["eu-central-1a", "eu-central-1b"],
    "route_table_ids": ["rtb-0123456789abcdef0", "rtb-0123456789abcdef1"],
}

UUID = "12345678-1234-1234-1234-123456789012"
CALLED_QUERY = {
    "certificate_arn": f"arn:aws:acm:eu-central-1:123456789012:certificate/{UUID}",
    "host": "query.example.org",
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tools/dormouse:1.0",
    "client_cidrs": ["10.20.0.0/16"],
    "client_security_groups": ["sg-0123456789abcdef0"],
    "endpoints": "existing",
    "disk_gb": 100,
    "rows_max": 1_000_000,
    "seconds_max": 3_600,
}
"""A `query` table that sets every optional key."""

CONFIGURATIONS: dict[str, Callable[[], DeploymentSettings]] = {
    "dev": file("dev"),
    "prod": file("prod"),
    "minimal": file("minimal"),
    "steps": lambda: settings(
        "prod",
        id="steps",
        account="123456789012",
        region="eu-central-1",
        architecture="x86_64",
        tags={"team": "storage"},
        network=EXISTING_VPC,
        database={
            "kind": "serverless",
            "min_acu": 0.5,
            "proxy": True,
            "readers": 1,
            "client_cidrs": ["10.30.0.0/16"],
            "client_security_groups": ["sg-0123456789abcdef1"],
        },
        commit={"service": True, "endpoints": "existing", "service_cpu": 2_048, "log_days": 90},
        compaction={"engine": "emr-ec2-steps", "instance_types": ["m7i.xlarge"], "endpoints": "existing"},
        query=CALLED_QUERY,
        rows={"databases": 3},
        access={"endpoints": "existing"},
    ),
    "transient": lambda: settings(
        "dev",
        id="transient",
        deploy_paused=True,
        compaction={"engine": "emr-ec2-transient"},
        query={},
        rows={"databases": 1, "own_clusters": True},
        access={},
    ),
    "served": lambda: settings("prod", id="served", commit={"service": True, "queues": 2}),
    "copied": lambda: settings(
        "minimal",
        id="copied",
        account="123456789012",
        region="eu-central-1",
        protected=True,
        backup={"copy_region": "eu-west-1"},
        audit={"events": "all"},
    ),
}
"""The configurations in config/, and four that cover the settings which those leave out."""


@dataclass(frozen=True)
class Resource:
    stack: str
    name: str
    type: str
    properties: Mapping[str, Any]
    body: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.stack}/{self.name}"


PARTS = (
    "access", "audit", "backup", "commit", "compaction", "garbage", "maintenance", "monitoring", "pause",
    "policies", "query", "tables",
)  # fmt: skip
"""The parts of the stack `application`. The paths of their resources contain their names."""


def divided(template: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each part of the template of the stack `application`, and what is left of it."""
    left = dict(template["Resources"])
    for part in PARTS:
        path = f"-application/{part.capitalize()}/"
        names = [name for name, body in left.items() if path in body["Metadata"]["aws:cdk:path"]]
        if names:
            yield part, {"Resources": {name: left.pop(name) for name in names}}
    yield "application", {**template, "Resources": left}


def by_part(stacks: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns templates by their short names. That of the stack `application` is divided into its parts."""
    whole = dict(stacks)
    parts = divided(whole.pop("application")) if "application" in whole else ()
    return dict(sorted([*parts, *whole.items()]))


class Assembly:
    """A synthesized folder. Stacks are named by their short names, such as `storage`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text("utf-8"))["artifacts"]

    @cached_property
    def id(self) -> str:
        """The id of the instance."""
        path = next(self.folder.glob("dormouse-*.template.json"))
        return path.name.removeprefix("dormouse-").split(".")[0].rpartition("-")[0]

    @cached_property
    def templates(self) -> dict[str, dict[str, Any]]:
        """The templates. That of the stack `application` is divided into its parts."""
        return by_part(self.stacks)

    @cached_property
    def stacks(self) -> dict[str, dict[str, Any]]:
        """The templates as they are."""
        paths = sorted(self.folder.glob("*.template.json"))
        return {short(path.name.split(".")[0]): json.loads(path.read_text("utf-8")) for path in paths}

    def resources(self, *types: str) -> Iterator[Resource]:
        """Yields the resources of the given types, or all resources."""
        for stack, template in self.templates.items():
            for name, body in template.get("Resources", {}).items():
                if not types or body["Type"] in types:
                    yield Resource(stack, name, body["Type"], body.get("Properties", {}), body)

    def stack(self, name: str) -> dict[str, Any]:
        """Returns the manifest's entry for a stack: tags, protection and dependencies."""
        name = "application" if name in PARTS else name
        return next(
            artifact
            for full, artifact in self.manifest.items()
            if artifact["type"] == "aws:cloudformation:stack" and short(full) == name
        )

    @cached_property
    def acknowledged(self) -> list[tuple[str, str, str]]:
        """The construct's path, the finding and the reason of each acknowledgement."""
        found = []
        for path in sorted(self.folder.glob("*.metadata.json")):
            for construct, entries in json.loads(path.read_text("utf-8")).items():
                for entry in entries:
                    if entry["type"] == "aws:cdk:acknowledged-rules":
                        found += [
                            (construct, finding.removeprefix("Annotation::"), reason)
                            for finding, reason in entry["data"].items()
                        ]
        return sorted(found)

    @cached_property
    def findings(self) -> list[str]:
        """The findings of cdk-nag that the code does not acknowledge."""
        report = json.loads((self.folder / "validation-report.json").read_text("utf-8"))
        return [
            f"{violation['ruleName']}: {construct['constructPath']}"
            for plugin in report["pluginReports"]
            for violation in plugin["violations"]
            for construct in violation["violatingConstructs"]
        ]


def short(full: str) -> str:
    """Returns the short name of a stack: `commit` for `dormouse-dev-commit`."""
    return full.rpartition("-")[2]


def synthesize(configuration: DeploymentSettings, folder: Path, *, checked: bool = True) -> Assembly:
    """Synthesizes a configuration into a folder. Without the cdk-nag check, this takes half the time."""
    from stacks.assets import Assets
    from stacks.instance import build, new_app

    app = new_app(str(folder))
    build(configuration, assets=Assets(Path(f"{folder}.stubs")), app=app)
    if checked:
        check(app)
    else:
        app.synth()
    return Assembly(folder)


def check(app: cdk.App) -> None:
    """Synthesizes an app with cdk-nag, which writes its findings to the validation report."""
    import aws_cdk as cdk
    from cdk_nag import AwsSolutionsChecks

    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    try:
        app.synth()
    except RuntimeError as error:
        if "ValidationFailed" not in str(error):
            raise
