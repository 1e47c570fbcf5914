"""Draws the stacks of an instance as Mermaid, from their templates: what is there, and what uses what."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dormouse.settings.config_file import load

Place = tuple[str, str]
"""A stack, and the logical id of a resource in it."""

# what is drawn: the shape of its box, its type and the type's name
SHAPES = {
    "[{}]": "EC2::VPC VPC, EC2::VPCEndpoint endpoint, RDS::DBProxy RDS Proxy, Budgets::Budget budget, "
    "EMRServerless::Application EMR Serverless, ElasticLoadBalancingV2::LoadBalancer load balancer, "
    "EC2::Instance host, Route53::HostedZone private zone, CloudWatch::Dashboard dashboard",
    "[({})]": "S3::Bucket bucket, RDS::DBCluster Aurora PostgreSQL",
    "([{}])": "Lambda::Function lambda, ECS::Service Fargate",
    "[/{}/]": "SQS::Queue queue, SNS::Topic topic",
    "{{{{{}}}}}": "Events::Rule rule",
    "[[{}]]": "StepFunctions::StateMachine state machine",
}
SHOWN = {
    f"AWS::{kind}": (name, shape)
    for shape, kinds in SHAPES.items()
    for kind, _, name in (one.partition(" ") for one in kinds.split(", "))
}
COUNTED = {"AWS::CloudWatch::Alarm": "alarm", "AWS::KMS::Key": "key", "AWS::RDS::DBInstance": "instance"}
# what a resource calls or reads is what this property refers to
USES = {
    "AWS::Lambda::EventSourceMapping": "FunctionName",
    "AWS::Events::Rule": "Targets",
    "AWS::SQS::Queue": "RedrivePolicy",
    "AWS::StepFunctions::StateMachine": "DefinitionString",
    "AWS::Lambda::Function": "Role",
    "AWS::ECS::Service": "TaskDefinition",
}
PAGE = Path(__file__).parents[1] / "docs/reference/stacks.md"


def draw(templates: Mapping[str, Mapping[str, Any]]) -> str:
    """Mermaid's text for the templates of an instance, by stack, in the order of their names."""
    graph = _Graph(templates)
    lines = ["flowchart LR"]
    for stack in sorted(templates):
        inside = [(name, one["Type"]) for (of, name), one in graph.resources.items() if of == stack]
        counts = Counter(COUNTED[kind] for _, kind in inside if kind in COUNTED)
        boxes = [(name, *SHOWN[kind]) for name, kind in inside if kind in SHOWN]
        content = [f"    {_id(stack, name)}{shape.format(_label(name, kind))}" for name, kind, shape in boxes]
        for what, count in sorted(counts.items()):
            content.append(f'    {_id(stack, what + "s")}["{count} {what}{"s" * (count > 1)}"]')
        lines += [f'  subgraph {_id(stack)}["{_id(stack)}"]', *content, "  end"] if content else []
    arrows = {
        (start, to, line) for start, to, line in graph.arrows() if start != to and graph.shows(start, to)
    }
    # a lambda that polls a queue is called by it
    arrows -= {(to, start, line) for start, to, line in arrows if graph.kind(start) == "AWS::SQS::Queue"}
    lines += [f"  {_id(*start)} {line} {_id(*to)}" for start, to, line in sorted(arrows)]
    return "\n".join(lines) + "\n"


class _Graph:
    """What refers to what; by way of roles, policies and mappings, which are not drawn."""

    def __init__(self, templates: Mapping[str, Mapping[str, Any]]) -> None:
        def parts(section: str) -> dict[Place, Any]:
            stacks = [(stack, one.get(section, {})) for stack, one in sorted(templates.items())]
            return {(stack, name): of[name] for stack, of in stacks for name in sorted(of)}

        self.resources = parts("Resources")
        values = {
            json.dumps(self._property(place, "Name")): place for place in self.of("AWS::SSM::Parameter")
        }
        told = {
            place: values.get(json.dumps(one.get("Default"))) for place, one in parts("Parameters").items()
        }
        self._names = {place: value for place, value in told.items() if value}
        """The SSM parameter behind each parameter of a template that is read from one."""
        outputs = [(place[0], one) for place, one in parts("Outputs").items() if "Export" in one]
        self._exports = {json.dumps(one["Export"]["Name"]): (stack, one["Value"]) for stack, one in outputs}
        self._policies = [(one, [*self.referred(one, "Roles")]) for one in self.of("AWS::IAM::Policy")]

    def kind(self, place: Place) -> str:
        return str(self.resources.get(place, {}).get("Type"))

    def of(self, kind: str) -> list[Place]:
        return [place for place in self.resources if self.kind(place) == kind]

    def shows(self, *places: Place) -> bool:
        return all(self.kind(place) in SHOWN for place in places)

    def _property(self, place: Place, name: str) -> Any:
        return self.resources.get(place, {}).get("Properties", {}).get(name)

    def arrows(self) -> Iterator[tuple[Place, Place, str]]:
        """From where to where, and the line; dotted to where what fails goes."""
        for place, resource in self.resources.items():
            kind, sources, targets = resource["Type"], [place], list[Place]()
            if kind in USES:
                targets = self._used(place, USES[kind])
                sources = self.referred(place, "EventSourceArn") or [place]
            elif kind == "AWS::ElasticLoadBalancingV2::LoadBalancer":  # services wait for its listeners
                targets = [one for one in self.of("AWS::ECS::Service") if one[0] == place[0]]
            elif kind.startswith("Custom::"):  # calls a function, which may hand its event to others
                sources = self.referred(place, "ServiceToken")
                called = [one for first in sources for one in self._used(first, "Role")]
                sources += [one for one in called if self.kind(one) == "AWS::Lambda::Function"]
                targets = [*self._in(place[0], {**resource["Properties"], "ServiceToken": None})]
            line = "-.->" if kind == "AWS::SQS::Queue" else "-->"
            yield from ((source, target, line) for source in sources for target in targets)

    def _used(self, place: Place, name: str) -> list[Place]:
        """What a property refers to, and what a role that it refers to may touch."""
        found = self.referred(place, name)
        for one in found[:]:
            found += self._used(one, "TaskRoleArn") + self.referred(one, "Policies")
            for policy, roles in self._policies:
                found += self.referred(policy, "PolicyDocument") if one in roles else []
        return found

    def referred(self, place: Place, name: str) -> list[Place]:
        """The resources that a property refers to, also in other stacks."""
        return list(self._in(place[0], self._property(place, name)))

    def _in(self, stack: str, value: Any) -> Iterator[Place]:
        match value:
            case {"Ref": name} if (stack, name) in self._names:
                yield from self.referred(self._names[stack, name], "Value")
            case {"Ref": name} | {"Fn::GetAtt": [name, *_]} | {"Fn::GetAtt": name}:
                yield stack, name
            case {"Fn::ImportValue": name} if json.dumps(name) in self._exports:
                yield from self._in(*self._exports[json.dumps(name)])
            case {"Fn::Sub": str(text)} | {"Fn::Sub": [text, *_]}:
                yield from ((stack, name) for name in re.findall(r"\$\{(\w+)", text))
            case dict() | list():
                for inner in value.values() if isinstance(value, dict) else value:
                    yield from self._in(stack, inner)


def _label(name: str, kind: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", _named(name)).lower()
    return f'"{words}"' if kind.lower() in words else f'"{words} ({kind})"'


def _id(stack: str, *parts: str) -> str:
    return re.sub(r"\W", "_", "_".join([stack.rsplit("-", 1)[-1], *map(_named, parts)]))


def _named(logical_id: str) -> str:
    return re.sub(r"[0-9A-F]{8}$", "", logical_id)


def main() -> None:
    """Draws config/prod.toml in docs/reference/stacks.md."""
    from stacks.assets import StubAssets
    from stacks.instance import build, new_app
    from stacks.node import use_bundled_node

    use_bundled_node()
    with tempfile.TemporaryDirectory() as folder:
        settings = load(PAGE.parents[2] / "config/prod.toml")
        app = new_app(f"{folder}/out")
        assembly = build(settings, assets=StubAssets(Path(folder)), app=app).synth()
        diagram = draw({stack.stack_name: stack.template for stack in assembly.stacks})
    before, _, after = PAGE.read_text("utf-8").partition("```mermaid\n")
    PAGE.write_text(f"{before}```mermaid\n{diagram}```{after.partition('```')[2]}", "utf-8")


if __name__ == "__main__":
    main()
