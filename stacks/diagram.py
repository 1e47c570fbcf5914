"""Draws the stacks of an instance as Mermaid, from their templates: what is there, and what uses what."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dormouse.settings.config_file import load

Template = Mapping[str, Any]
Place = tuple[str, str]
"""A stack, and the logical id of a resource in it."""

# what is drawn: the type's name, and the shape of its box
SHOWN = {
    "AWS::EC2::VPC": ("VPC", "[{}]"),
    "AWS::EC2::VPCEndpoint": ("endpoint", "[{}]"),
    "AWS::S3::Bucket": ("bucket", "[({})]"),
    "AWS::RDS::DBCluster": ("Aurora PostgreSQL", "[({})]"),
    "AWS::RDS::DBProxy": ("RDS Proxy", "[{}]"),
    "AWS::Lambda::Function": ("lambda", "([{}])"),
    "AWS::SQS::Queue": ("queue", "[/{}/]"),
    "AWS::Events::Rule": ("rule", "{{{{{}}}}}"),
    "AWS::StepFunctions::StateMachine": ("state machine", "[[{}]]"),
    "AWS::EMRServerless::Application": ("EMR Serverless", "[{}]"),
    "AWS::ElasticLoadBalancingV2::LoadBalancer": ("load balancer", "[{}]"),
    "AWS::ECS::Service": ("Fargate", "([{}])"),
    "AWS::EC2::Instance": ("host", "[{}]"),
    "AWS::Route53::HostedZone": ("private zone", "[{}]"),
    "AWS::SNS::Topic": ("topic", "[/{}/]"),
    "AWS::CloudWatch::Dashboard": ("dashboard", "[{}]"),
    "AWS::Budgets::Budget": ("budget", "[{}]"),
}
COUNTED = {"AWS::CloudWatch::Alarm": "alarms", "AWS::KMS::Key": "keys", "AWS::RDS::DBInstance": "instances"}
ROOT = Path(__file__).parents[1]
_PAGE = """# The stacks

What `config/prod.toml` deploys. `make docs` draws it from the synthesized templates, and a test compares.
Arrows go from what calls or reads to what is called or read, as rules, state machines and policies say;
dotted ones to where messages go that could not be handled.

```mermaid
{diagram}```

Each box is a CloudFormation stack, `dormouse-<id>-<name>`. Those of `network`, `storage`, `database`,
`migrate` and `tables` are always there, each of the others when its table is in the settings. Every function
has a role and a log group of its own, and in the VPC a security group, which are not drawn. Stacks tell
`dormouse pause`, `resume` and `status` what they have, in SSM parameters below `/dormouse/<id>/`.
"""
_HASH = re.compile(r"[0-9A-F]{8}$")
_IN_SUB = re.compile(r"\$\{(\w+)")


def draw(templates: Mapping[str, Template]) -> str:
    """Mermaid's text for the templates of an instance, by stack, in the order of their names."""
    resources = {
        (stack, name): resource
        for stack, template in sorted(templates.items())
        for name, resource in sorted(template.get("Resources", {}).items())
    }
    graph = _Graph(resources, _exports(templates), _parameters(templates))
    lines = ["flowchart LR"]
    for stack in sorted(templates):
        lines += _box(stack, {place: one for place, one in resources.items() if place[0] == stack})
    return "\n".join([*lines, *(f"  {line}" for line in graph.arrows())]) + "\n"


def _box(stack: str, resources: Mapping[Place, Any]) -> Iterator[str]:
    counts = Counter(COUNTED[one["Type"]] for one in resources.values() if one["Type"] in COUNTED)
    shown = [(place, one) for place, one in resources.items() if one["Type"] in SHOWN]
    if not shown and not counts:
        return
    yield f'  subgraph {_id(stack)}["{_short(stack)}"]'
    for place, one in shown:
        kind, shape = SHOWN[one["Type"]]
        label = f'"{_label(place, kind)}"'
        yield f"    {_id(*place)}{shape.format(label)}"
    for what, count in sorted(counts.items()):
        yield f'    {_id(stack, what)}["{count} {what if count > 1 else what.removesuffix("s")}"]'
    yield "  end"


class _Graph:
    """What refers to what; by way of roles, policies and mappings, which are not drawn."""

    def __init__(
        self,
        resources: Mapping[Place, Any],
        exports: Mapping[str, Place],
        parameters: Mapping[Place, Place],
    ) -> None:
        self._resources = resources
        self._exports = exports
        self._parameters = parameters
        self._policies: dict[Place, list[Place]] = defaultdict(list)
        for place, one in resources.items():
            if one["Type"] == "AWS::IAM::Policy":
                for role in self._referred(place[0], one["Properties"].get("Roles")):
                    self._policies[role].append(place)

    def arrows(self) -> list[str]:
        """A line for each pair; dotted to where what fails goes."""
        found = set()
        for (stack, name), one in self._resources.items():
            for source, target, line in self._arrows_of((stack, name), one):
                if source != target and self._is_shown(source) and self._is_shown(target):
                    found.add((source, target, line))
        # a lambda that polls a queue is called by it
        found -= {(target, source, line) for source, target, line in found if self._is_polled(source)}
        return [f"{_id(*source)} {line} {_id(*target)}" for source, target, line in sorted(found)]

    def _arrows_of(self, place: Place, one: Any) -> Iterator[tuple[Place, Place, str]]:
        sources, targets, line = self._ends(place, one["Type"], one.get("Properties", {}))
        yield from ((source, target, line) for source in sources for target in targets)

    def _ends(
        self, place: Place, kind: str, properties: Mapping[str, Any]
    ) -> tuple[list[Place], list[Place], str]:
        """From where to where arrows go because of a resource, and what they look like."""

        def referred(value: Any) -> list[Place]:
            return list(self._referred(place[0], value))

        sources, targets = [place], list[Place]()
        match kind:
            case "AWS::Lambda::EventSourceMapping":
                sources = referred(properties["EventSourceArn"])
                targets = referred(properties["FunctionName"])
            case "AWS::Events::Rule":
                targets = referred([target["Arn"] for target in properties["Targets"]])
            case "AWS::SQS::Queue":
                targets = referred(properties.get("RedrivePolicy"))
            case "AWS::StepFunctions::StateMachine":
                targets = referred(properties.get("DefinitionString"))
            case "AWS::Lambda::Function":
                targets = list(self._used_by(place[0], properties["Role"]))
            case "AWS::ECS::Service":
                for task in referred(properties["TaskDefinition"]):
                    role = self._resources[task]["Properties"]["TaskRoleArn"]
                    targets += self._used_by(task[0], role)
            case "AWS::ElasticLoadBalancingV2::LoadBalancer":
                targets = self._behind(place)
            case _ if kind.startswith("Custom::"):
                first = referred(properties["ServiceToken"])
                sources = [*first, *(called for one in first for called in self._called_by(one))]
                targets = referred({**properties, "ServiceToken": None})
        return sources, targets, "-.->" if kind == "AWS::SQS::Queue" else "-->"

    def _called_by(self, function: Place) -> Iterator[Place]:
        """The functions that a function hands its event to."""
        for used in self._used_by(function[0], self._resources[function]["Properties"]["Role"]):
            if used in self._resources and self._resources[used]["Type"] == "AWS::Lambda::Function":
                yield used

    def _behind(self, balancer: Place) -> list[Place]:
        """The services that a load balancer's stack has: they wait for its listeners."""
        return [
            place
            for place, one in self._resources.items()
            if place[0] == balancer[0] and one["Type"] == "AWS::ECS::Service"
        ]

    def _used_by(self, stack: str, role_of: Any) -> Iterator[Place]:
        """What a role may touch."""
        for role in self._referred(stack, role_of):
            for policy in self._policies[role]:
                yield from self._referred(policy[0], self._resources[policy]["Properties"]["PolicyDocument"])
            inline = self._resources[role]["Properties"].get("Policies") if role in self._resources else None
            yield from self._referred(role[0], inline)

    def _referred(self, stack: str, value: Any) -> Iterator[Place]:
        """The resources that a value refers to, also in other stacks."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                match key:
                    case "Ref" if (stack, inner) in self._parameters:
                        told = self._parameters[stack, inner]
                        yield from self._referred(told[0], self._resources[told]["Properties"]["Value"])
                    case "Ref":
                        yield stack, inner
                    case "Fn::GetAtt":
                        yield stack, inner[0] if isinstance(inner, Sequence) else inner
                    case "Fn::ImportValue" if isinstance(inner, str) and inner in self._exports:
                        yield self._exports[inner]
                    case "Fn::Sub":
                        text = inner if isinstance(inner, str) else inner[0]
                        yield from ((stack, name) for name in _IN_SUB.findall(text))
                    case _:
                        yield from self._referred(stack, inner)
        elif isinstance(value, list):
            for inner in value:
                yield from self._referred(stack, inner)

    def _is_polled(self, place: Place) -> bool:
        return bool(self._resources[place]["Type"] == "AWS::SQS::Queue")

    def _is_shown(self, place: Place) -> bool:
        return place in self._resources and self._resources[place]["Type"] in SHOWN


def _exports(templates: Mapping[str, Template]) -> dict[str, Place]:
    """The resource behind each exported value."""
    found = {}
    for stack, template in templates.items():
        for output in template.get("Outputs", {}).values():
            name = output.get("Export", {}).get("Name")
            if isinstance(name, str):
                text = json.dumps(output["Value"])
                match = re.search(r'"(?:Ref|Fn::GetAtt)": \[?"(\w+)"', text)
                if match:
                    found[name] = (stack, match[1])
    return found


def _parameters(templates: Mapping[str, Template]) -> dict[Place, Place]:
    """The SSM parameter behind each parameter of a template that is read from one."""
    told = {
        resource["Properties"].get("Name"): (stack, name)
        for stack, template in templates.items()
        for name, resource in template.get("Resources", {}).items()
        if resource["Type"] == "AWS::SSM::Parameter"
    }
    return {
        (stack, name): told[parameter.get("Default")]
        for stack, template in templates.items()
        for name, parameter in template.get("Parameters", {}).items()
        if parameter.get("Default") in told
    }


def _label(place: Place, kind: str) -> str:
    name = _HASH.sub("", place[1])
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
    return f"{words} ({kind})" if kind.lower() not in words else words


def _id(stack: str, *parts: str) -> str:
    return re.sub(r"\W", "_", "_".join([_short(stack), *(_HASH.sub("", part) for part in parts)]))


def _short(stack: str) -> str:
    return stack.rsplit("-", 1)[-1]


def page() -> str:
    """docs/reference/stacks.md: the stacks of config/prod.toml."""
    from stacks.assets import StubAssets
    from stacks.instance import build, new_app

    with tempfile.TemporaryDirectory() as folder:
        app = new_app(f"{folder}/out")
        assembly = build(load(ROOT / "config/prod.toml"), assets=StubAssets(Path(folder)), app=app).synth()
        templates = {stack.stack_name: stack.template for stack in assembly.stacks}
    return _PAGE.format(diagram=draw(templates))


if __name__ == "__main__":
    from stacks.node import use_bundled_node

    use_bundled_node()
    (ROOT / "docs/reference/stacks.md").write_text(page(), "utf-8")
