-- name: page
-- Jobs of a day after another, without its rounds.
select e.job_key, e.job_id, k.name, e.token, e.started_at
from {day} e
join job_kind k using (kind_id)
where e.job_key > %(after)s and e.kind_id > 0
order by e.job_key
limit %(limit)s;

-- name: forget
-- Forgets jobs of a day, after all that belonged to them.
delete from {day} where job_key = any(%(job_keys)s);

-- name: held_since
-- The day since which what was there is held for somebody; null: it is not.
select (min(since) at time zone 'UTC')::date from hold where until > clock_timestamp() and table_id is null;

-- name: late_days
-- The days of jobs that no partition was made for in time.
select distinct (ended_at at time zone 'UTC')::date from ended_job_default;
