"""Jobs: started, run, looked at, cancelled."""

from __future__ import annotations

import pytest

from dormouse.jobs import JobStore
from dormouse.objects import open_store
from dormouse.payloads import PayloadStore
from dormouse.postgres import ConnectionSupplier


@pytest.fixture
def jobs(supplier: ConnectionSupplier, tmp_path) -> JobStore:
    objects = open_store(tmp_path / "objects")
    return JobStore(supplier, objects, PayloadStore(supplier, objects), lambda: None)


def test_a_job_is_run_and_gives_its_result(jobs: JobStore) -> None:
    job_id = jobs.start("double", {"n": 21})
    assert jobs.status(job_id).is_waiting
    report = jobs.worker({"double": lambda request, progress: {"n": 2 * request["n"]}}).run(drain=True)
    assert report.complete == 1
    assert jobs.result(job_id) == {"n": 42}
    job = jobs.status(job_id)
    assert (job.state, job.attempts, job.is_waiting) == ("COMPLETE", 1, False)
    assert [one.job_id for one in jobs.list()] == [job_id]
