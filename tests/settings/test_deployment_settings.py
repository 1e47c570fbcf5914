"""The file of a deployment's settings. All mistakes are reported at once, one a line, as InvalidInput."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidInput
from dormouse.settings.config_file import BYTES_MAX, load, tables
from dormouse.settings.database import FixedDatabase
from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.section import has_instance_store
from tests.support.settings import parse

ROOT = Path(__file__).parents[2]
VPC = """[network]
vpc_id = "vpc-0a1b2c3d"
subnet_ids = ["subnet-0a1b2c3d", "subnet-1a1b2c3d"]
availability_zones = ["eu-west-1a", "eu-west-1b"]
"""


def lines(text: str) -> list[str]:
    """Returns the lines of the error for a settings file. The file begins with a valid id, then `text`."""
    with pytest.raises(InvalidInput) as caught:
        parse(tomllib.loads(text if text.startswith("id =") else f'id = "dev"\n{text}'), "f")
    found = str(caught.value).splitlines()
    assert all(line.startswith("f: ") for line in found)
    return [line.removeprefix("f: ") for line in found]


@pytest.mark.parametrize("name", ["dev", "prod", "minimal"])
def test_the_files_of_the_repository_are_valid(name: str) -> None:
    assert load(ROOT / "config" / f"{name}.toml").id == name


def test_everything_else_has_a_default_and_tables_may_be_empty() -> None:
    found = parse(tomllib.loads('id = "a1"\n[commit]\n[garbage]\n'))
    assert (found.database.kind, found.commit is not None, found.compaction) == ("serverless", True, None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('id = "D"', 'id = "D": it must be 2 to 20 of a-z, 0-9 and -, first a letter, '),
        ('id = "aa-bb-cc-dd-ee-ff-ggg"', 'id = "aa-bb-cc-dd-ee-ff-ggg": it must be 2 to 20'),
        ("[commit]\nconcurrency = 1", "commit.concurrency = 1: it must be a whole number, 2 to 1,000"),
        ("[commit]\nconcurrency = true", "commit.concurrency = true: it must be a whole number"),
        ('[commit]\nqueues = "4"', 'commit.queues = "4": it must be a whole number, 1 to 16'),
        ("[commit]\nqueues = 2.0", "commit.queues = 2.0: it must be a whole number"),
        ("[commit]\nqueues = 1979-05-27", "commit.queues = 1979-05-27: it must be a whole number"),
        ("[commit]\nqueues = {a = 1}", 'commit.queues = {"a": 1}: it must be a whole number'),
        (
            "[commit]\ntimeout_seconds = 30",
            "commit.timeout_seconds = 30: it must be a whole number, 41 to 900",
        ),
        ("protected = 1", "protected = 1: it must be true or false"),
        ("commit = true", "commit = true: it must be a table, which begins with [commit]"),
        ("[[commit]]", "commit = [{}]: it must be a table, which begins with [commit]"),
        ('database = "big"', 'database = "big": it must be a table, which begins with [database]'),
        ('account = "1"\nregion = "eu-west-1"', 'account = "1": it must be the 12 digits'),
        (
            '[database]\nkind = "serverless"\nmin_acu = 0.3',
            "database.min_acu = 0.3: it must be a number, 0 to 256",
        ),
        (
            '[database]\nkind = "serverless"\nmax_acu = nan',
            "database.max_acu = nan: it must be a number, 1 to",
        ),
        (
            '[database]\nkind = "serverless"\nmax_acu = inf',
            "database.max_acu = inf: it must be a number, 1 to",
        ),
        (
            "[monitoring]\nbudget_usd_month = inf",
            "monitoring.budget_usd_month = inf: it must be a number, more than 0",
        ),
        ("[database]\nmax_acu = 2", 'database.kind is missing: it must be "serverless" or "fixed"'),
        ('[database]\nkind = "huge"', 'database.kind = "huge": it must be "serverless" or "fixed"'),
        (
            "[network]\nflow_log_days = 8",
            "network.flow_log_days = 8: it must be 7, 14, 30, 60, 90, 180 or 365",
        ),
        (
            '[network]\ncidr = "10.40.1.0/16"',
            'network.cidr = "10.40.1.0/16": the address is inside a network that begins',
        ),
        ('[network]\ncidr = "10.400.0.0/16"', 'network.cidr = "10.400.0.0/16": an IPv4 network'),
        ('[network]\ncidr = "8.8.0.0/16"', 'network.cidr = "8.8.0.0/16": it must be private'),
        (
            '[compaction]\nengine = "emr-ec2-steps"\nrelease = "emr-7.13.0"',
            'compaction.release = "emr-7.13.0": it must be "emr-spark-8.0.0" or "emr-spark-8.1.0"',
        ),
        ("[tags]\na = 3", "tags.a = 3: it must be text in quotes"),
        ('[tags]\n"aws:a" = ""', 'tags."aws:a" = "": a tag must not begin with aws:'),
        ('[tags]\nTeam = "a"\nteam = "b"', 'tags.team = "b": to IAM this is the same tag as Team'),
        ('[tags]\n"größe" = "b"', 'tags."größe" = "b": the name of a tag must be'),
        ('account = "١٢٣٤٥٦٧٨٩٠١٢"\nregion = "eu-west-1"', "account = "),
        ('[tags]\n"a\\nb" = ""', 'tags."a\\nb" = "": the name of a tag must be'),
    ],
)
def test_an_invalid_value_is_named_with_the_allowed_ones(text: str, line: str) -> None:
    (found,) = lines(text)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("protcted = true", "protcted is not a setting; did you mean protected?"),
        ("comit = 1", "comit is not a setting; did you mean commit?"),
        ("[garbage]\nevery_minute = 3", "garbage.every_minute is not a setting; did you mean every_minutes?"),
        ("zones = 2", "zones is not a setting; it is one of [network]"),
        (
            "[commit]\nprotected = true",
            "commit.protected is not a setting; it is one of the file itself: put it",
        ),
        (
            '[database]\nkind = "serverless"\ninstance_class = "r8g.large"',
            'database.instance_class is not a setting of database.kind = "serverless": it belongs to kind',
        ),
        (
            '[compaction]\nengine = "emr-serverless"\ninstances_max = 3',
            'compaction.instances_max is not a setting of compaction.engine = "emr-serverless": it',
        ),
        ("[pause]\nqqqqq = 3", "pause.qqqqq is not a setting; known there: drain_seconds"),
    ],
)
def test_an_unknown_key_is_reported_with_its_place_or_the_nearest_name(text: str, line: str) -> None:
    (found,) = lines(text)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('account = "123456789012"', 'account = "123456789012": account and region go together'),
        (
            '[database]\nkind = "serverless"\nmin_acu = 8\nmax_acu = 8',
            "database.max_acu = 8: it must be more than min_acu, which is 8",
        ),
        (
            '[database]\nkind = "serverless"\nmin_acu = 1\nauto_pause_seconds = 300',
            "database.auto_pause_seconds = 300: it needs min_acu = 0",
        ),
        (
            '[database]\nkind = "serverless"\nproxy = true',
            "database.proxy = true: it keeps the database awake",
        ),
        (
            'deploy_paused = true\n[database]\nkind = "fixed"',
            "deploy_paused = true: nothing would stop the database: add the table [pause]",
        ),
        ("[commit]\nbatching_window_seconds = 0", "commit.batching_window_seconds = 0: it must be 1 or more"),
        (
            "[commit]\ntimeout_seconds = 900\nreceives_max = 500",
            "commit.receives_max = 500: it must be 223 at most",
        ),
        (
            "[commit]\ntimeout_seconds = 300\nretention_days = 1",
            "commit.timeout_seconds = 300: it must be 287 at most with retention_days = 1, for 50 tries",
        ),
        (
            '[compaction]\nengine = "emr-ec2-steps"\ninstance_types = ["m7g.large", "m7g.large"]',
            'compaction.instance_types = ["m7g.large", "m7g.large"]: each may be listed only once',
        ),
        (
            '[compaction]\nengine = "emr-ec2-transient"\n'
            f"instance_types = {[f'm{n}g.large' for n in range(1, 7)]}",
            "compaction.instance_types = ",
        ),
        (
            f"[tags]\n{''.join(f't{n} = {chr(34)}{99 * chr(97)}{chr(34)}{chr(10)}' for n in range(7))}"
            '[compaction]\nengine = "emr-ec2-steps"',
            "tags = ",
        ),
        (
            '[compaction]\nengine = "emr-serverless"\nvcpu_max = 4',
            "compaction.vcpu_max = 4: it must be at least twice worker_vcpu",
        ),
        (
            '[network]\ncidr = "10.0.0.0/22"\n[compaction]\nengine = "emr-serverless"\nvcpu_max = 4000',
            "compaction.vcpu_max = 4000: its 1,000 workers need an address each, and 10.0.0.0/22 has 470 for "
            "them: choose at most 1,880,",
        ),
        (
            '[network]\ncidr = "10.0.0.0/22"\n[compaction]\nengine = "emr-ec2-steps"\ninstances_max = 251',
            "compaction.instances_max = 251: a cluster is in one subnet, and those of 10.0.0.0/22 have 251 "
            "addresses each: choose at most 250, or a larger network.cidr",
        ),
        (
            'architecture = "x86_64"\n[compaction]\nengine = "emr-ec2-steps"',
            "compaction.instance_types: m7g.xlarge, m6g.xlarge: other processors",
        ),
        (
            "[commit]\ntimeout_seconds = 300\n[monitoring]",
            "monitoring.oldest_message_seconds_max: it must be more than 1841: a message that is retried",
        ),
        (
            '[network]\nsubnet_ids = ["subnet-0a1b2c3d"]',
            'network.subnet_ids = ["subnet-0a1b2c3d"]: it is for an existing VPC',
        ),
        (
            '[network]\ns3_endpoint = "existing"',
            'network.s3_endpoint = "existing": it is for an existing VPC',
        ),
        (
            '[network]\navailability_zones = ["eu-west-1a", "eu-west-1a"]',
            'network.availability_zones = ["eu-west-1a", "eu-west-1a"]: 2 or 3 different',
        ),
        (
            '[network]\navailability_zones = ["eu-west-1a", "eu-west-1b"]\nzones = 3',
            "network.zones = 3: availability_zones has 2",
        ),
        (
            '[network]\navailability_zones = ["eu-west-1a", "us-east-1b"]',
            'network.availability_zones = ["eu-west-1a", "us-east-1b"]: us-east-1b is not of the region',
        ),
        (
            '[compaction]\nengine = "emr-ec2-steps"\ninstance_types = ["m7gd.large", "i8g.large"]',
            'compaction.instance_types = ["m7gd.large", "i8g.large"]: m7gd.large, i8g.large: the',
        ),
        (VPC, "network.route_table_ids: there must be one for each of subnet_ids"),
        (VPC + 's3_endpoint = "existing"\nzones = 3', "network.zones = 3: it is for an own VPC"),
        (
            VPC + 's3_endpoint = "existing"\nroute_table_ids = ["rtb-0a1b2c3d"]',
            'network.route_table_ids = ["rtb-0a1b2c3d"]: there',
        ),
        (
            'account = "123456789012"\nregion = "us-east-1"\n' + VPC + 's3_endpoint = "existing"',
            "network.availability_zones = ",
        ),
    ],
)
def test_settings_that_contradict_one_another_are_named(text: str, line: str) -> None:
    (found,) = lines(text)
    assert found.startswith(line)


def windows(backup: str | None, maintenance: str | None) -> str:
    lines = [f'backup_window = "{backup}"'] if backup else []
    lines += [f'maintenance_window = "{maintenance}"'] if maintenance else []
    return "\n".join(['[database]\nkind = "fixed"', *lines])


@pytest.mark.parametrize(
    ("backup", "maintenance", "line"),
    [
        ("03:00-03:20", "sun:05:00-sun:06:00", "database.backup_window = "),
        ("3:00-3:40", "sun:05:00-sun:06:00", 'database.backup_window = "3:00-3:40": it must be'),
        ("03:00-24:30", "sun:05:00-sun:06:00", "database.backup_window = "),
        ("03:00-04:00", "sun:05:00-sun:05:29", "database.maintenance_window = "),
        ("03:00-04:00", "sun:05:00-sun:05:00", "database.maintenance_window = "),
        ("03:00-04:00", "sun:05:00-mon:05:00", "database.maintenance_window = "),
        ("03:00-04:00", "Sunday 5:00", "database.maintenance_window = "),
        ("03:00-04:00", "sun:03:59-sun:05:00", "database.maintenance_window = "),
        ("23:30-00:30", "sat:23:00-sun:00:01", "database.maintenance_window = "),
        ("23:30-00:30", "mon:00:00-mon:00:40", "database.maintenance_window = "),
        ("03:00-04:00", None, "database.maintenance_window: "),
        (None, "sun:05:00-sun:06:00", "database.backup_window: "),
    ],
)
def test_windows_that_aws_would_refuse_are_named(
    backup: str | None, maintenance: str | None, line: str
) -> None:
    (found,) = lines(windows(backup, maintenance))
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("backup", "maintenance"),
    [
        ("03:00-04:00", "sun:04:00-sun:04:30"),
        ("23:30-00:00", "sat:00:00-sat:23:30"),
        ("23:45-00:15", "sun:00:15-sun:02:00"),
    ],
)
def test_windows_may_touch_and_cross_midnight(backup: str, maintenance: str) -> None:
    found = parse(tomllib.loads(f'id = "dev"\n{windows(backup, maintenance)}')).database
    assert (found.backup_window, found.maintenance_window) == (backup, maintenance)


@pytest.mark.parametrize(("version", "is_one"), [("17.10", True), ("17.3", False), ("18.1", False)])
def test_database_versions_that_aws_may_offer_later_are_accepted(version: str, is_one: bool) -> None:
    text = f'[database]\nkind = "serverless"\nengine_version = "{version}"'
    found = None if is_one else lines(text)
    assert found is None or found[0].startswith(
        f'database.engine_version = "{version}": it must be a version'
    )
    assert not is_one or parse(tomllib.loads(f'id = "dev"\n{text}')).database.engine_version == version


@pytest.mark.parametrize("sleeps", ['database = {kind = "fixed"}\npause = {}', ""])
def test_an_instance_may_be_deployed_paused_where_its_database_is_stopped(sleeps: str) -> None:
    assert parse(tomllib.loads(f'id = "dev"\ndeploy_paused = true\n{sleeps}')).deploy_paused


@pytest.mark.parametrize("more", ["", "zones = 3"])
def test_the_zones_of_a_vpc_may_be_chosen_by_name(more: str) -> None:
    zones = ("eu-west-1a", "eu-west-1c", "eu-west-1b")
    text = f'id = "dev"\n[network]\navailability_zones = {list(zones)}\n{more}'
    assert parse(tomllib.loads(text)).network.availability_zones == zones


WITHOUT_DISKS = [
    "m7g", "m6i", "c7gn", "c6in", "r8g", "x2iezn", "m7i-flex", "u7i-12tb", "hpc7g", "t4g", "m5zn", "g5g",
]  # fmt: skip
WITH_DISKS = [
    "m7gd", "r6id", "i4i", "i3en", "i8g", "i7ie", "im4gn", "is4gen", "d2", "d3en", "x2idn", "x2iedn", "x2gd",
    "c5ad", "m5dn", "r5dn", "z1d", "g4dn", "p4d", "p4de", "hpc6id", "h1", "f2", "x1", "x1e", "g5", "trn1n",
]  # fmt: skip


@pytest.mark.parametrize(
    "network", ["zones = 3", 'availability_zones = ["eu-west-1a", "eu-west-1b", "eu-west-1c"]']
)
def test_every_zone_of_the_own_vpc_has_addresses_for_workers(network: str) -> None:
    for vcpu_max in (2_884, 2_888):
        compaction = f'[compaction]\nengine = "emr-serverless"\nvcpu_max = {vcpu_max}'
        text = f'id = "dev"\n[network]\ncidr = "10.0.0.0/22"\n{network}\n{compaction}'
        if vcpu_max == 2_884:
            parse(tomllib.loads(text))
        else:
            with pytest.raises(InvalidInput, match="choose at most 2,884,"):
                parse(tomllib.loads(text))


def test_instance_types_with_local_disks_are_recognised() -> None:
    assert [one for one in WITHOUT_DISKS if has_instance_store(f"{one}.xlarge")] == []
    assert [one for one in WITH_DISKS if not has_instance_store(f"{one}.xlarge")] == []


def test_mistakes_and_contradictions_are_reported_at_once() -> None:
    found = lines(
        'id = "D"\naccount = "123456789012"\nwhat = 1\n[network]\nzones = 9\n'
        '[database]\nkind = "serverless"\nmin_acu = 8\nmax_acu = 4\nbackup_days = 99\n'
        "[commit]\nbatching_window_seconds = 0\nqueues = 99\n[garbage]\nmemory_mb = 1\n"
    )
    keys = {line.split(" ")[0].rstrip(":") for line in found}
    assert keys == {
        "id", "account", "what", "network.zones", "database.max_acu", "database.backup_days",
        "commit.batching_window_seconds", "commit.queues", "garbage.memory_mb",
    }  # fmt: skip
    assert len(found) == len(keys)


def test_an_invalid_value_is_not_checked_against_others_by_its_default() -> None:
    (found,) = lines('[database]\nkind = "serverless"\nmin_acu = 8\nmax_acu = "9"')
    assert found.startswith('database.max_acu = "9"')


def test_numbers_in_lists_hide_no_contradiction() -> None:
    found = lines('[network]\nsubnet_ids = [1, 2]\ncidr = "10.40.1.0/16"')
    assert [line.split(" ")[0] for line in found] == [
        "network.subnet_ids.0",
        "network.subnet_ids.1",
        "network.cidr",
    ]


def test_a_table_of_unknown_kind_is_checked_as_the_most_likely_kind() -> None:
    found = lines("[database]\nmin_acu = 300\nmax_acu = 4\nbackup = 3")
    assert {line.split(" ")[0] for line in found} == {"database.kind", "database.min_acu", "database.backup"}


def test_a_table_is_read_by_its_kind() -> None:
    found = parse(tomllib.loads('id = "p"\n[database]\nkind = "fixed"'.replace('"p"', '"p1"')))
    assert isinstance(found.database, FixedDatabase)
    assert found.database.pause_after_seconds is None


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"\x00", "is not TOML"),
        (b"id = 'a'\nid = 'b'", "is not TOML"),
        (b"[a]\n[a]", "is not TOML"),
        (b"a = " + b"[" * 5_000, "nested too deeply"),
        (b"a = " + b"9" * 5_000, "is not TOML"),
        (b"# " + b"x" * BYTES_MAX, "bytes"),
        (b"", "id is missing: it must be text in quotes"),
        (b"id = 'dev'\nprotected = 0x" + b"f" * 9_000, "protected = "),
    ],
)
def test_a_hostile_file_is_reported_in_one_line(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=word) as caught:
        load(path)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1_000


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_bytes(b'\xef\xbb\xbfid = "dev"\r\n')
    assert load(path).id == "dev"


def test_a_missing_file_is_reported_with_existing_ones(tmp_path: Path) -> None:
    (tmp_path / "prod.toml").touch()
    for path, word in ((tmp_path, "is not a file"), (tmp_path / "prd.toml", "did you mean .*prod.toml")):
        with pytest.raises(InvalidInput, match=word):
            load(path)
    with pytest.raises(InvalidInput):
        load("a\x00b")


KEYS = st.sampled_from(
    sorted({name for table in tables() for name in (table.key, *table.properties)} | {"x", "0", "a.b", "é\n"})
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.times()
    | st.datetimes() | st.sampled_from(["serverless", "fixed", "emr-serverless", "vpc-0a1b2c3d", 2**70])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_any_document_is_valid_or_refused_with_lines(content: dict[str, Any]) -> None:
    try:
        assert isinstance(parse(content), DeploymentSettings)
    except InvalidInput as error:
        assert str(error)
        assert all(line.startswith("settings: ") for line in str(error).split("\n"))


@given(content=st.binary(max_size=200))
def test_any_bytes_are_valid_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(content)
    with contextlib.suppress(InvalidInput):
        load(path)


def test_scheduled_calls_end_before_the_next_check_of_a_pause() -> None:
    most = {"garbage": {"timeout_seconds": 900}, "maintenance": {"timeout_seconds": 600}}
    assert parse({"id": "dev", **most}, "f").scheduled_seconds == 900
    assert parse({"id": "dev"}, "f").scheduled_seconds == 0
