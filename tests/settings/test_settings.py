from __future__ import annotations

import ast
import pkgutil
from importlib import import_module
from pathlib import Path

import pydantic
import pytest

import dormouse.settings
from dormouse.errors import InvalidInput
from tests.support.settings import load_settings

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "dormouse" / "settings"
READERS = ("dormouse", "stacks", "lambdas")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "DSN",
        "CONNECTIONS_MAX",
        "SPARK_MASTER",
        "SPARK_DRIVER_MEMORY",
        "JAVA_HOME",
        "COMMIT_QUEUE",
        "QUEUES",
    ):
        monkeypatch.delenv(f"DORMOUSE_{name}", raising=False)
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = load_settings()
    assert (settings.dsn, settings.connections_max, settings.java_home) == (None, 8, None)


def test_the_environment_is_read_and_an_override_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", "postgresql://h/d")
    monkeypatch.setenv("DORMOUSE_CONNECTIONS_MAX", "3")
    monkeypatch.setenv("JAVA_HOME", "/opt/java")
    settings = load_settings(connections_max=4)
    assert (settings.dsn, settings.connections_max) == ("postgresql://h/d", 4)
    assert settings.java_home == Path("/opt/java")


@pytest.mark.parametrize(
    ("variable", "field"),
    [("DORMOUSE_SPARK_MASTER", "spark_master"), ("dormouse_dsn", "dsn"), ("JAVA_HOME", "java_home")],
)
def test_a_change_of_the_environment_is_seen(
    monkeypatch: pytest.MonkeyPatch, variable: str, field: str
) -> None:
    seen = []
    for value in ("local[1]", "local[2]"):
        monkeypatch.setenv(variable, value)
        seen.append(str(getattr(load_settings(), field)))
    assert seen == ["local[1]", "local[2]"]


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", "")
    monkeypatch.setenv("JAVA_HOME", " ")
    assert (load_settings().dsn, load_settings().java_home) == (None, None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DORMOUSE_CONNECTIONS_MAX", "0"),
        ("DORMOUSE_CONNECTIONS_MAX", "x"),
        ("DORMOUSE_CONNECTION_IDLE_SECONDS_MAX", "inf"),
        ("DORMOUSE_SPARK_DRIVER_MEMORY", "4gb"),
        ("DORMOUSE_SPARK_DRIVER_MEMORY", "511m"),
        ("DORMOUSE_SPARK_MASTER", "local[0]"),
        ("DORMOUSE_SPARK_MASTER", "everywhere"),
        ("DORMOUSE_COMMIT_QUEUE", "queue"),
        ("DORMOUSE_QUEUES", "0"),
        ("DORMOUSE_TREE_CACHE_BYTES", "-1"),
    ],
)
def test_an_invalid_setting_is_named_in_one_line(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput, match=rf"^the setting [a-z_]+ \({variable}\) is not valid: [^\n]+$"):
        load_settings()


def test_an_invalid_number_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_QUEUES", "two")
    with pytest.raises(InvalidInput, match=r"valid integer.*, not 'two'$"):
        load_settings()
    monkeypatch.setenv("DORMOUSE_QUEUES", "257")
    with pytest.raises(InvalidInput, match=r"less than or equal to 256, not '257'$"):
        load_settings()


def test_each_commit_queue_has_its_url() -> None:
    assert load_settings(commit_queue="postgres", queues=3).commit_queue_urls == ()
    urls = ("https://a/1", "https://b/2")
    assert load_settings(commit_queue=", ".join(urls), queues=2).commit_queue_urls == urls
    with pytest.raises(InvalidInput, match="the URLs of 2 queues, not of 3"):
        load_settings(commit_queue=",".join(urls), queues=3)


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(InvalidInput, match="conections_max"):
        load_settings(conections_max=3)


def test_settings_are_frozen() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        load_settings().connections_max = 9  # type: ignore[misc]


def models() -> list[type[pydantic.BaseModel]]:
    """Returns every settings model: of processes, services, lambdas and deployments."""
    modules = [
        import_module(f"dormouse.settings.{one.name}") for one in pkgutil.iter_modules([str(SETTINGS)])
    ]
    found = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    return [
        one
        for one in found
        if issubclass(one, pydantic.BaseModel) and one.__module__.startswith(dormouse.settings.__name__)
    ]


@pytest.mark.slow
def test_every_setting_is_used() -> None:
    """Each setting must be read by code outside of the settings, directly or through a derived property."""
    files = [ROOT / "app.py", *(path for one in READERS for path in (ROOT / one).rglob("*.py"))]
    read = {name for path in files if SETTINGS not in path.parents for name in attributes(tree(path))}
    for path in SETTINGS.glob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and node.name in read:
                read |= attributes(node)
    fields = {f"{model.__name__}.{field}": field for model in models() for field in model.model_fields}
    assert len(fields) > 100
    assert [name for name, field in sorted(fields.items()) if field not in read] == []


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def attributes(node: ast.AST) -> set[str]:
    return {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


@pytest.mark.parametrize(
    "value", ["local", "local[*]", "local[4]", "local[4,2]", "spark://host:7077", "yarn"]
)
def test_valid_spark_masters_are_accepted(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_SPARK_MASTER", value)
    assert load_settings().spark_master == value
