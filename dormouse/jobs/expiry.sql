-- name: page
-- Jobs of a day after another, without its rounds.
select e.job_key, e.job_id, k.name, e.token, e.started_at
from {day} e
join job_kind k using (kind_id)
where e.job_key > %(after)s and e.kind_id > 0
order by e.job_key
limit %(limit)s;

-- name: known
-- Those of some keys that jobs have.
select k.job_key
from unnest(%(job_keys)s::uuid[]) as k (job_key)
where exists (select from job j where j.job_key = k.job_key)
    or exists (select from ended_job e where e.job_key = k.job_key);

-- name: late_days
-- The days of jobs that no partition was made for in time.
select distinct (ended_at at time zone 'UTC')::date from ended_job_default;
