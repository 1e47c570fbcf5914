"""A part that is taken out of the settings leaves its stack, without which the keeper must do."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dormouse.aws.aws import AwsRefused, action
from dormouse.aws.instance import read_instance
from dormouse.aws.keeper import keep
from dormouse.settings.resources import resources_path, state_parameter
from tests.assembly import CONFIGURATIONS, Assembly, settings, short, synthesize
from tests.support.aws import Aws
from tests.template import allowed, flat

SWITCHED = ("commit", "garbage", "compaction", "maintenance", "query", "access")
FULL: dict[str, Any] = {"id": "dev", "query": {}, "access": {}, "maintenance": {}}


def named(part: str, value: Any) -> str:
    """Returns a template's text in which each resource is named `<part>~<logical id>`."""
    pieces = value["Fn::Join"][1] if isinstance(value, dict) else [value]
    return "".join(each if isinstance(each, str) else f"{part}~{flat(each)}" for each in pieces)


def parameters(assembly: Assembly) -> dict[str, str]:
    """Returns the parameters that describe the stacks, by their names."""
    path = f"{resources_path(assembly.id)}/"
    return {
        each.properties["Name"]: named(each.stack, each.properties["Value"])
        for each in assembly.resources("AWS::SSM::Parameter")
        if str(each.properties["Name"]).startswith(path)
    }


class AccountOfDev(Aws):
    """An account in which everything is off but the database, which AWS has just started."""

    def __init__(self, texts: dict[str, str], rights: list[tuple[str, str, Any]]) -> None:
        self.texts, self.rights, self.status = texts, rights, "available"

    @property
    def region(self) -> str:
        return "eu-west-1"

    def pages(self, service: str, operation: str, **given: Any) -> Any:
        yield self.call(service, operation, **given)

    def call(self, service: str, operation: str, **given: Any) -> Any:
        self.check(action(service, operation), json.dumps(given))
        match operation:
            case "get_parameter":
                if given["Name"] not in self.texts:
                    raise AwsRefused("ParameterNotFound", given["Name"])
                since = datetime(2026, 11, 1, tzinfo=UTC)
                return {"Parameter": {"Value": self.texts[given["Name"]], "LastModifiedDate": since}}
            case "describe_db_clusters":
                return {"DBClusters": [{"Status": self.status, "DBClusterMembers": []}]}
            case "stop_db_cluster":
                self.status = "stopped"
            case "describe_rule":
                return {"State": "DISABLED"}
            case "get_event_source_mapping":
                return {"State": "Disabled"}
            case "get_function_configuration":
                return {"Timeout": 60}
            case "describe_stacks":
                asleep = {"ParameterKey": "Running", "ParameterValue": "false"}
                return {"Stacks": [{"StackStatus": "UPDATE_COMPLETE", "Parameters": [asleep]}]}
        return {}

    def check(self, wanted: str, given: str) -> None:
        """Refuses a call without a right to the resource that it names."""
        names = {name for part, name in re.findall(r"(\w+)~(\w+)", given) if part != "database"}
        names |= {short(name) for name in re.findall(r"dormouse-dev-\w+", given)}
        rights = [resource for right, resource, _ in self.rights if right == wanted]
        if not rights or not all(any(name in resource for resource in rights) for name in names):
            raise AwsRefused("AccessDeniedException", f"no right to {wanted} of {given}")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return synthesize(settings("dev", **FULL), tmp_path_factory.mktemp("full"), checked=False)


@pytest.mark.few(1)  # each is an application of its own
@pytest.mark.parametrize("part", SWITCHED)
def test_the_keeper_stops_the_database_although_the_stack_of_a_removed_part_is_left(
    part: str, full: Assembly, tmp_path: Path
) -> None:
    removed = {part: None} | ({"maintenance": None} if part == "compaction" else {})
    rest = synthesize(settings("dev", **FULL | removed), tmp_path, checked=False)
    texts = parameters(full) | parameters(rest) | {state_parameter("dev"): "paused"}
    account = AccountOfDev(texts, list(allowed(rest, "pause", "PauseRole")))
    kept = keep(read_instance("dev", account))
    assert (account.status, kept.left) == ("stopped", ())


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_the_stack_names_the_parts_that_describe_themselves(name: str, synthesized: Any) -> None:
    described = parameters(synthesized(name))
    [application] = [json.loads(text) for path, text in described.items() if path.endswith("/application")]
    others = {path.rpartition("/")[2] for path in described} - {"application", "database", "storage"}
    assert set(application["parts"]) == others
