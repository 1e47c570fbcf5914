"""Tests of Dormouse in another CDK app: the package `dormouse_cdk` of the wheel, and the example."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import InvalidInput
from packages import Architecture
from setup import NAME, make_cdk
from stacks.build import main as build_main
from tests.assembly import CONFIGURATIONS, ROOT, Assembly, by_part, settings
from tests.infrastructure.reviewed import reviewable, reviewed

EXAMPLE = ROOT / "examples/own_app"
SITE = Path(sysconfig.get_path("purelib"))
All = Callable[[str], Assembly]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files that the wheel installs."""
    target = tmp_path_factory.mktemp("site")
    make_cdk(target)
    shutil.copytree(ROOT / "dormouse", target / "dormouse", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dormouse_command.py", target)
    return target


def python(site: Path, cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the libraries and the packages in `site`, and without the checkout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CDK_", "AWS_"))}
    path = os.pathsep.join((str(site), str(SITE)))  # -S, because site-packages would lead to the checkout
    return subprocess.run(
        [sys.executable, "-S", "-B", *arguments],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def stacks_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the templates of a folder, by the names of their stacks in its manifest."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))["artifacts"]
    return {
        one.get("properties", {}).get("stackName", name): json.loads(
            (folder / one["properties"]["templateFile"]).read_text("utf-8")
        )
        for name, one in manifest.items()
        if one["type"] == "aws:cdk:stack" or one["type"] == "aws:cloudformation:stack"
    }


def named_apart_from_places(templates: dict[str, Any]) -> dict[str, Any]:
    """Returns the templates without names that depend on the place of the instance in the app.

    For example, a reference to a resource in another stack has a name that ends in hashes of the paths.
    """
    text = json.dumps(templates).replace("sales", "minimal").replace("test/lake/", "")
    text = text.replace('"Stands in for what is built."', '"<hash>"')
    text = re.sub(
        r'(?:testlake)?(dormouseminimal[a-z]+[A-Z]\w*?)[0-9A-F]{8,12}(?:to)?[0-9A-F]{8,12}(?=")', r"\1", text
    )
    found: dict[str, Any] = json.loads(text)
    for template in found.values():
        for body in template["Resources"].values():
            body["DependsOn"] = sorted(body.get("DependsOn", []))
    return found


def test_the_wheel_has_no_folder_with_a_common_name(site: Path) -> None:
    assert sorted(path.name for path in site.iterdir()) == ["dormouse", NAME, "dormouse_command.py"]
    for path in (site / NAME).rglob("*.py"):
        if "sources" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert [name for name in names if name.split(".")[0] == "stacks"] == [], path


@pytest.mark.slow
def test_the_example_creates_the_same_stacks_as_our_app_and_its_own(site: Path, tmp_path: Path) -> None:
    """The example runs outside the checkout, without our cdk.json, and puts the instance into a Stage."""
    example = tmp_path / "app"
    shutil.copytree(EXAMPLE, example)
    out = tmp_path / "out"
    done = python(site, tmp_path, str(example / "app.py"), CDK_OUTDIR=str(out))
    assert done.returncode == 0, done.stderr
    [stage] = out.glob("assembly-*")
    found = stacks_of(stage)
    report = found.pop("test-report")
    ours = {name.removeprefix("dormouse-sales-"): template for name, template in found.items()}
    as_reviewed = named_apart_from_places(reviewed("minimal"))
    as_minimal = named_apart_from_places(reviewable(by_part(ours)))
    assert as_minimal.keys() == as_reviewed.keys()
    for name, template in as_reviewed.items():
        for resources in (as_minimal[name]["Resources"], template["Resources"]):
            # a digest of names and tags, which differ between the apps
            resources.get("Guarded", {}).get("Properties", {}).pop("Changes", None)
        assert as_minimal[name]["Resources"] == template["Resources"], name
    assert report["Outputs"].keys() == {"Data", "Database", "Queue1", "DeadLetters1"}
    kinds = sorted(body["Type"] for body in report["Resources"].values())
    assert "AWS::EC2::SecurityGroupIngress" in kinds
    [function] = [one for one in report["Resources"].values() if one["Type"] == "AWS::Lambda::Function"]
    variables = function["Properties"]["Environment"]["Variables"]
    assert set(variables) == {"DORMOUSE_DSN", "DORMOUSE_OBJECTS"}
    assert "rds-iam://dormouse_read@" in json.dumps(variables)
    [policy] = [one for one in report["Resources"].values() if one["Type"] == "AWS::IAM::Policy"]
    actions = [one["Action"] for one in policy["Properties"]["PolicyDocument"]["Statement"]]
    assert sorted(actions) == ["kms:Decrypt", "rds-db:connect", "s3:GetObject", "s3:ListBucket"]


@pytest.mark.slow
def test_the_example_without_packages_refuses_to_be_deployed(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = python(site, tmp_path, str(EXAMPLE / "app.py"), CDK_OUTDIR=str(out))
    assert done.returncode == 0, done.stderr
    [stage] = out.glob("assembly-*")
    line = "so a deploy is refused: run python -m dormouse_cdk.build lambdas"
    refused = {path.name: line in path.read_text("utf-8") for path in stage.glob("*.assets.json")}
    assert {name.startswith("testreport"): is_refused for name, is_refused in refused.items()} == {
        True: False,
        False: True,
    }
    assert line in "".join(path.read_text("utf-8") for path in stage.glob("*.json"))


def test_mistakes_in_the_settings_end_an_own_app_with_one_line_each() -> None:
    import aws_cdk as cdk

    from stacks import Dormouse

    with pytest.raises(InvalidInput) as error:
        Dormouse(cdk.App(), "lake", {"id": "No", "comit": {}})
    mistake, unknown = str(error.value).splitlines()
    assert mistake.startswith('lake: id = "No"')
    assert unknown == "lake: comit is not a setting; did you mean commit?"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["prod", "steps"])
def test_feature_flags_of_an_app_change_nothing(name: str, synthesized: All, tmp_path: Path) -> None:
    """The app sets none of our feature flags, and the opposite of some.

    The construct is called `Default`, which the CDK leaves out of all names. So the templates equal those of
    our app, and an instance can move between the apps.
    """
    import aws_cdk as cdk

    from stacks import Dormouse
    from stacks.assets import Assets

    opposite = {"@aws-cdk/aws-iam:minimizePolicies": False, "@aws-cdk/aws-kms:aliasNameRef": False}
    app = cdk.App(outdir=str(tmp_path), context=opposite)
    Dormouse(app, "Default", CONFIGURATIONS[name](), assets=Assets(Path(f"{tmp_path}.stubs")))
    app.synth()
    found = {key.rpartition("-")[2]: one for key, one in stacks_of(tmp_path).items()}
    text = json.dumps(reviewable(by_part(found))).replace(
        '"Default/', '"'
    )  # in the names that the console shows
    assert json.loads(text) == reviewable(synthesized(name).templates)


@pytest.mark.slow
def test_names_of_roles_stay_when_an_instance_moves_into_an_own_app(tmp_path: Path) -> None:
    import aws_cdk as cdk

    from stacks import Dormouse
    from stacks.assets import Assets
    from tests.assembly import synthesize

    named = settings("minimal", iam={"role_prefix": "acme-"})
    synthesize(named, tmp_path / "ours", checked=False)
    app = cdk.App(outdir=str(tmp_path / "own"))
    Dormouse(cdk.Stage(app, "test"), "lake", named, assets=Assets(tmp_path / "stubs"))
    app.synth()
    ours, own = (
        sorted(re.findall(r"acme-minimal-[0-9a-f]{8}", json.dumps(stacks_of(folder))))
        for folder in (tmp_path / "ours", tmp_path / "own/assembly-test")
    )
    assert len(set(ours)) == 8 and own == ours


@pytest.mark.slow
def test_a_role_that_may_log_in_as_run_gets_the_queues() -> None:
    import aws_cdk as cdk
    from aws_cdk import assertions
    from aws_cdk import aws_ec2 as ec2
    from aws_cdk import aws_iam as iam

    from stacks import Dormouse

    app = cdk.App()
    lake = Dormouse(app, "lake", {"id": "sales", "commit": {"queues": 2}})
    stack = cdk.Stack(app, "Own")
    group = ec2.SecurityGroup(stack, "Group", vpc=lake.vpc)
    role = iam.Role(stack, "Role", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
    variables = lake.let_in(role, group, login="dormouse_run")
    assert variables["DORMOUSE_QUEUES"] == "2"
    assert stack.resolve(variables["DORMOUSE_COMMIT_QUEUE"])["Fn::Join"][0] == ""
    template = assertions.Template.from_stack(stack).to_json()
    [policy] = [one for one in template["Resources"].values() if one["Type"] == "AWS::IAM::Policy"]
    sent = [
        one
        for one in policy["Properties"]["PolicyDocument"]["Statement"]
        if "sqs:SendMessage" in one["Action"]
    ]
    assert len(sent) == 1 and len(sent[0]["Resource"]) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "count"), [({"databases": 2}, 2), ({"own_clusters": True, "databases": 1}, 1), (None, 0)]
)
def test_a_role_that_may_log_in_gets_the_addresses_of_row_indexes(
    rows: dict[str, int | bool] | None, count: int
) -> None:
    import aws_cdk as cdk
    from aws_cdk import aws_ec2 as ec2
    from aws_cdk import aws_iam as iam

    from stacks import Dormouse

    app = cdk.App()
    lake = Dormouse(app, "lake", {"id": "sales", **({"rows": rows} if rows else {})})
    stack = cdk.Stack(app, "Own")
    group = ec2.SecurityGroup(stack, "Group", vpc=lake.vpc)
    role = iam.Role(stack, "Role", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
    variables = lake.let_in(role, group, login="dormouse_run")
    assert variables.get("DORMOUSE_ROW_INDEXES", "").count("rds-iam://dormouse_run@") == count


@pytest.mark.slow
def test_an_instance_id_is_unique_in_its_region() -> None:
    import aws_cdk as cdk

    from stacks import Dormouse

    app = cdk.App()
    Dormouse(app, "one", {"id": "sales"})
    with pytest.raises(InvalidInput, match=r"^there is an instance sales here already: choose another id$"):
        Dormouse(app, "two", {"id": "sales"})
    Dormouse(cdk.Stage(app, "other"), "one", {"id": "sales"})
    haifa = cdk.Stage(app, "haifa", env=cdk.Environment(account="123456789012", region="il-central-1"))
    with pytest.raises(InvalidInput, match="the certificates of Amazon RDS in il-central-1 are not in"):
        Dormouse(haifa, "one", {"id": "sales"})


def test_a_part_that_cannot_be_built_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert build_main(["lamdas", "--into", str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == "error: there is no part lamdas: name lambdas, emr-package, query-image\n"
    )


@pytest.mark.slow
def test_the_installed_wheel_builds_the_packages_of_a_deploy(
    site: Path, built_lambdas: Callable[[Architecture], Path], tmp_path: Path
) -> None:
    """The packages equal those that the checkout builds. The app then uses them in place of placeholders."""
    done = python(site, tmp_path, "-m", "dormouse_cdk.build", "lambdas", "query-image")
    assert done.returncode == 0, done.stderr
    assert build_main(["query-image", "--into", str(tmp_path / "ours")]) == 0
    lambdas = ("lambdas/commit-arm64", "lambdas/pause-arm64")
    ours = {**dict.fromkeys(lambdas, built_lambdas("arm64")), "query-image": tmp_path / "ours"}
    for one, folder in ours.items():
        assert contents(tmp_path / "build" / one) == contents(folder / one)
    done = python(site, tmp_path, str(EXAMPLE / "app.py"), CDK_OUTDIR=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    [stage] = (tmp_path / "out").glob("assembly-*")
    assert "executable" not in "".join(path.read_text("utf-8") for path in stage.glob("*.assets.json"))


@pytest.mark.slow
def test_pip_installs_the_same_files_as_tested_here(site: Path, tmp_path: Path) -> None:
    """Compares the files of `site` with those that pip installs from the sdist."""
    source, tools, target = tmp_path / "source", tmp_path / "tools", tmp_path / "target"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, str(tools), "setuptools>=77"], check=True, capture_output=True)
    make = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    done = python(tools, source, "-c", make)
    assert done.returncode == 0, done.stderr
    [sdist] = tmp_path.glob("*.tar.gz")
    subprocess.run([*pip, str(target), str(sdist)], check=True, capture_output=True)
    assert files(target / NAME) == files(site / NAME)
    importable = {path.name for path in target.iterdir() if path.suffix != ".dist-info"}
    assert importable == {"bin", "dormouse", NAME, "dormouse_command.py", "pyspark_dormouse"}


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
