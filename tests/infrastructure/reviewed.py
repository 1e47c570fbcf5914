"""The reviewed templates: one whole assembly, and how those of other settings differ from it.

`pytest tests/infrastructure --snapshot-update` renews them. `__snapshots__/test_templates` has the whole
assembly of the settings in `WHOLE`. For other settings it has the removed, renamed, changed and added values,
by path in the assembly:

- The names and indexes in a path are those after the changes of outer collections.
- In a list, `removed` has indexes from before the change. `added` has lists of new values, by the old index
  before which they are inserted. `changed` has indexes from after the change.

Templates are written in a shorter form, which `restored` turns back into the same values:

- `<id>` is the id of the instance. `<ssm name>` is the logical id of a parameter that is read from SSM.
- A text with references in guillemets is a `Fn::Join` of its parts, or one `Ref`, `Fn::GetAtt` or
  `Fn::ImportValue`. `«Name[5]»` is the part with index 5 of a value that is divided at colons.
  `«function Name»` is the name in the ARN of a lambda.
- A long text of a `Fn::Join` is a list of lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from difflib import SequenceMatcher
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from syrupy.extensions.json import JSONSnapshotExtension

WHOLE = "prod"
SNAPSHOTS = Path(__file__).parent / "__snapshots__"
WIDTH_MAX = 140
"""The greatest length of a line, in characters. A longer collection has one line for each element."""

TEXT_MAX = 200
"""The greatest length of a text on one line, in characters. A longer text has several lines."""

SHARED_MIN = 60
"""The least length, in characters, of a repeated collection that is written once and then referred to."""

DIGEST = re.compile(r"[0-9a-f]{64}")
HASH_OF_ID = re.compile(r"[0-9A-F]{8,12}")
LINE_END = re.compile(r"""(?<=[\]}],)(?=[\[{])|(?<=},)(?=")|(?<=,)(?="properties")""")
SSM = "C96584B6F00A464EAD1953AFF4B05118Parameter"
EXPORT = ("dormouse-<id>-", ":ExportsOutput")
Templates = dict[str, Any]
Pair = tuple[Any, Any, Any]
"""(key or index, old value, new value) of a place where two collections differ."""


def reviewable(templates: Mapping[str, Any]) -> Templates:
    """Returns the templates without bootstrap version, hashes of uploads and paths of constructs."""
    cleaned = {}
    for stack, template in templates.items():
        parameters = {
            name: value
            for name, value in template.get("Parameters", {}).items()
            if name != "BootstrapVersion"
        }
        kept = {key: value for key, value in template.items() if key not in {"Rules", "Parameters"}}
        resources = template.get("Resources", {})
        kept["Resources"] = {name: _without_path(body) for name, body in resources.items()}
        cleaned[stack] = kept | ({"Parameters": parameters} if parameters else {})
    found: Templates = json.loads(DIGEST.sub("<hash>", json.dumps(cleaned)))
    return found


def _without_path(resource: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in resource.get("Metadata", {}).items() if key != "aws:cdk:path"}
    kept = {key: value for key, value in resource.items() if key != "Metadata"}
    return kept | ({"Metadata": metadata} if metadata else {})


def shortened(templates: Mapping[str, Any], instance: str) -> Templates:
    """Returns the reviewable templates in the shorter form, after checking that no value is lost."""
    given = reviewable(templates)
    text = json.dumps(given)
    assert "<id>" not in text and "<ssm " not in text
    text = re.sub(rf"SsmParameterValuedormouse{instance}(\w+){SSM}", r"<ssm \1>", text)
    text = re.sub(rf"(?i:(?<=dormouse))([- /]?){instance}", r"\1<id>", text)
    found: Templates = _short(json.loads(text))
    assert restored(found, instance) == given
    return found


def restored(short: Mapping[str, Any], instance: str) -> Templates:
    """Returns the full templates of those in the shorter form."""
    text = json.dumps(_long(short)).replace("<id>", instance)
    found: Templates = json.loads(
        re.sub(r"<ssm (\w+)>", rf"SsmParameterValuedormouse{instance}\1{SSM}", text)
    )
    return found


def reviewed(name: str) -> Templates:
    """Returns the reviewed templates of a configuration in full.

    The snapshot of `copied` has only the resources that backups, copies and the audit add.
    """
    short = _read(name)
    return restored(short if name in {WHOLE, "copied"} else applied(short, whole()), name)


def whole() -> Templates:
    """Returns the reviewed templates of `WHOLE` in the shorter form."""
    found: Templates = _read(WHOLE)
    return found


@cache
def _read(name: str) -> Any:
    folder, of = ("backup_stack", "") if name == "copied" else ("templates", f"[{name}]")
    path = SNAPSHOTS / f"test_{folder}/test_the_templates_are_as_reviewed{of}.yaml"
    return yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)


# --- differences


def differences(before: Any, after: Any, path: str = "") -> dict[str, dict[str, Any]]:
    """Returns the removed, renamed, changed and added values between two collections.

    By path of a collection that differs, and by kind of change: see the top of this file.
    """
    if isinstance(before, dict):
        found, inner = _of_objects(before, after)
    else:
        found, inner = _of_lists(before, after)
    changes = {path: shown} if (shown := {key: value for key, value in found.items() if value}) else {}
    for key, one, other in inner:
        if isinstance(one, dict | list) and isinstance(other, type(one)):
            changes |= differences(one, other, f"{path}/{_escaped(key)}")
        else:
            changes.setdefault(path, {}).setdefault("changed", {})[key] = other
    return changes


def _of_objects(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], list[Pair]]:
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    renamed: dict[str, str] = {}
    for old in gone:  # another hash in a logical id
        left = [one for one in new if one not in renamed.values()]
        same = [one for one in left if HASH_OF_ID.sub("", one) == HASH_OF_ID.sub("", old)]
        if same:
            renamed[old] = same[0]
    found = {
        "removed": [one for one in gone if one not in renamed],
        "renamed": renamed,
        "added": {one: after[one] for one in new if one not in renamed.values()},
    }
    pairs = {renamed.get(key, key): value for key, value in before.items() if key not in found["removed"]}
    kept = [(key, pairs[key], after[key]) for key in sorted(pairs)]
    return found, [pair for pair in kept if _text(pair[1]) != _text(pair[2])]


def _of_lists(before: list[Any], after: list[Any]) -> tuple[dict[str, Any], list[Pair]]:
    removed: list[int] = []
    added: dict[int, list[Any]] = {}
    inner: list[Pair] = []
    texts = [[_text(one) for one in side] for side in (before, after)]
    for kind, start, end, at, till in SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        both = min(end - start, till - at)
        inner += [(at + n, before[start + n], after[at + n]) for n in range(both)]
        removed += range(start + both, end)
        if after[at + both : till]:
            added[start + both] = after[at + both : till]
    return {"removed": removed, "added": added}, inner


def applied(changes: Mapping[str, Mapping[str, Any]], before: Templates) -> Templates:
    """Returns a copy of `before` with the changes, which `differences` has returned."""
    found = deepcopy(before)
    for path, change in sorted(changes.items()):
        place: Any = found
        for key in path.split("/")[1:]:
            place = place[int(key) if isinstance(place, list) else _unescaped(key)]
        removed, added = change.get("removed", ()), change.get("added", {})
        if isinstance(place, list):
            kept = [[one] if index not in removed else [] for index, one in enumerate(place)]
            place[:] = [one for index, old in enumerate([*kept, []]) for one in [*added.get(index, ()), *old]]
        else:
            for key in removed:
                del place[key]
            place |= {new: place.pop(old) for old, new in change.get("renamed", {}).items()} | added
        for key, value in change.get("changed", {}).items():
            place[key] = value
    return found


def _escaped(key: str | int) -> str:
    """Returns a key as a part of a path, escaped as in a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --- the shorter form


def _short(value: Any) -> Any:
    match value:
        case {"Fn::Join": ["", [_, _, *_] as parts]}:
            text = "".join(one if isinstance(one, str) else f"«{_reference(one)}»" for one in parts)
            if _parts(text) == parts:
                return text if len(text) <= TEXT_MAX else {"Fn::Join": LINE_END.split(text)}
        case {"Ref": _} | {"Fn::GetAtt": _} | {"Fn::ImportValue": _} | {"Fn::Select": _}:
            if not (text := _reference(value)).startswith("{") and _referred(text) == value:
                return f"«{text}»"
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


def _long(value: Any) -> Any:
    match value:
        case str() if "«" in value:
            parts = _parts(value)
            return {"Fn::Join": ["", parts]} if len(parts) > 1 else parts[0]
        case {"Fn::Join": [str(first), *lines]} if first:
            return {"Fn::Join": ["", _parts("".join([first, *lines]))]}
        case dict():
            return {key: _long(one) for key, one in value.items()}
        case list():
            return [_long(one) for one in value]
    return value


def _reference(value: Any) -> str:
    """Returns the text that stands between guillemets for a CloudFormation function.

    Known functions have a short form; the text of all others is their JSON.
    """
    match value:
        case {"Ref": str(name)}:
            return name[1:-1] if name.startswith("<ssm ") else name
        case {"Fn::GetAtt": [name, attribute]}:
            return f"{name}.{attribute}"
        case {"Fn::ImportValue": str(name)} if name.startswith(EXPORT[0]):
            return "import " + name.removeprefix(EXPORT[0]).replace(EXPORT[1], ":", 1)
        case {"Fn::Select": [_, {"Fn::Split": [_, {"Fn::Join": [_, [*_, {"Ref": name}]]}]}]} if (
            value == _name(name)
        ):
            return f"function {_reference({'Ref': name})}"
        case {"Fn::Select": [int(number), {"Fn::Split": [":", {"Ref": _} as inner]}]}:
            return f"{_reference(inner)}[{number}]"
    return json.dumps(value)


def _name(function: str) -> dict[str, Any]:
    """Returns the CloudFormation expression with which the CDK takes a lambda's name from its ARN."""
    account = [
        "arn:",
        {"Ref": "AWS::Partition"},
        ":lambda:",
        {"Ref": "AWS::Region"},
        ":",
        {"Ref": "AWS::AccountId"},
    ]
    arn = {"Fn::Join": ["", [*account, ":function:", {"Ref": function}]]}
    return {"Fn::Select": [6, {"Fn::Split": [":", arn]}]}


def _parts(text: str) -> list[Any]:
    """Splits a text at its guillemets into plain texts and the functions of the references."""
    texts = re.split("«(.*?)»", text)
    return [_referred(one) if number % 2 else one for number, one in enumerate(texts) if number % 2 or one]


def _referred(text: str) -> Any:
    if text.startswith("{"):
        return json.loads(text)
    if part := re.fullmatch(r"(.*)\[(\d+)\]", text):
        return {"Fn::Select": [int(part[2]), {"Fn::Split": [":", _referred(part[1])]}]}
    kind, _, name = text.partition(" ") if " " in text else ("", "", text)
    if kind == "function":
        return _name(_referred(name)["Ref"])
    if kind == "ssm":
        return {"Ref": f"<ssm {name}>"}
    if kind == "import":
        return {"Fn::ImportValue": EXPORT[0] + name.replace(":", EXPORT[1], 1)}
    return {"Fn::GetAtt": name.split(".", 1)} if "." in name else {"Ref": name}


# --- the files


class Yaml(JSONSnapshotExtension):
    """A snapshot file in YAML, with few long lines.

    A repeated collection is written once, and later replaced by an alias.
    """

    file_extension = "yaml"

    def serialize(self, data: Any, **_: Any) -> str:
        """Returns the data as the text of a YAML file."""
        node = _Dumper("").represent_data(_shared(data, {}))
        _fit(node, set())
        found: str = yaml.serialize(node, Dumper=_Dumper, width=100_000, allow_unicode=True)
        return found


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return not isinstance(data, dict | list) or len(_text(data)) < SHARED_MIN

    def generate_anchor(self, node: yaml.Node) -> str:
        """Returns a name derived from the content, so that adding an anchor renames no other."""
        return sha256(yaml.serialize(node, Dumper=yaml.CSafeDumper).encode()).hexdigest()[:6]


def _shared(value: Any, known: dict[str, Any]) -> Any:
    """Returns a copy of the value in which equal collections are the same object, and keys are sorted."""
    if isinstance(value, dict):
        value = {key: _shared(one, known) for key, one in sorted(value.items())}
    elif isinstance(value, list):
        value = [_shared(one, known) for one in value]
    else:
        return value
    return known.setdefault(_text(value), value)


def _fit(node: yaml.Node, seen: set[yaml.Node]) -> int:
    """Marks each collection in a node that is short enough to be written on one line.

    Returns the node's width in characters.
    """
    if node in seen:
        return len("*a1b2c3")
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + 2
    seen.add(node)
    items = [(one,) for one in node.value] if isinstance(node, yaml.SequenceNode) else node.value
    width = sum(2 + sum(_fit(one, seen) for one in item) for item in items)
    node.flow_style = width < WIDTH_MAX
    return width
