-- name: known
-- Returns the keys that are of jobs, also of ended ones.
select k.job_key
from unnest(%(job_keys)s::uuid[]) as k (job_key)
where exists (select from job j where j.job_key = k.job_key)
    or exists (select from ended_job e where e.job_key = k.job_key);
