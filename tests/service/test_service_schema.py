"""Random requests made from the service's own description. It must not crash, and must answer as
described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import allow_header_conformance, positive_data_acceptance

import dormouse as dm
from dormouse.service.app import create_app
from tests.serving import serving, stand_in
from tests.support.settings import load_service_settings

load_all_checks()
FLIGHTS = dm.Schema(
    row_keys=[dm.Field("carrier", dm.STRING), dm.Field("flight", dm.LONG)],
    values=[dm.Field("delay", dm.DOUBLE, nullable=True), dm.Field("tags", dm.LIST(dm.STRING))],
)
_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}
# a schema cannot describe which columns and statements fit the tables
_EXCLUDED = [positive_data_acceptance]
# a GET of this path reads the row table `preview`; the description has it as /v1/rows/{table}
_OF_TWO_PATHS = "/v1/rows/preview"


_NO_INSTANCE: Any = stand_in(check_reachable=None)
_APP = create_app(_NO_INSTANCE, load_service_settings(sql_workers=0, job_threads=0))
schema = schemathesis.openapi.from_dict(_APP.openapi())
briefly = schemathesis.openapi.from_dict(_APP.openapi())
briefly.config.phases.coverage.enabled = False


@pytest.fixture(scope="module")
def url(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    objects = Path(tmp_path_factory.mktemp("objects")).as_uri()
    with dm.connect(new_database(template_database), objects) as instance:
        table = instance.create_table("flights", FLIGHTS, split_points=["DL"])
        table.ingest(
            pa.table(
                {"carrier": ["AA", "UA"], "flight": [1, 2], "delay": [None, 1.5], "tags": [["a"], []]},
                schema=pa.schema(
                    [
                        ("carrier", "string"),
                        ("flight", "int64"),
                        ("delay", "double"),
                        ("tags", pa.list_(pa.string())),
                    ]
                ),
            )
        )
        with serving(instance, job_threads=0) as url:
            yield url


def validate(case: schemathesis.Case, url: str) -> None:
    excluded = [*_EXCLUDED, *([allow_header_conformance] if case.path == _OF_TWO_PATHS else [])]
    case.call_and_validate(base_url=url, excluded_checks=excluded)


@briefly.parametrize()
@settings(max_examples=5, **_SETTINGS)
def test_answers_agree_with_the_description(case: schemathesis.Case, url: str) -> None:
    validate(case, url)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=400, **_SETTINGS)
def test_answers_to_many_requests_agree_with_the_description(case: schemathesis.Case, url: str) -> None:
    validate(case, url)
