-- name: report
-- Tells of ingests that ended so long ago.
insert into ended_job (job_key, ended_at, kind_id, state, started_at, claimed_at, about, message, error, worker)
select gen_random_uuid(), r.ended_at, k.kind_id, case when r.error is null then 'COMPLETE' else 'FAILED' end,
    r.ended_at - make_interval(secs => r.seconds), r.ended_at - make_interval(secs => r.seconds), r.name, r.message, r.error,
    %(worker)s
from job_kind k
cross join lateral (
    select clock_timestamp() - make_interval(secs => age) as ended_at, seconds, name, message, error
    from unnest(%(tables)s::text[], %(seconds)s::float8[], %(ages)s::float8[], %(messages)s::text[], %(errors)s::text[])
        as g (name, seconds, age, message, error)
    offset 0
) r
where k.name = %(kind)s;
