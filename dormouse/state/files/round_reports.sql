-- name: report
-- Lists ingests among the ended jobs; ages are the seconds since their ends.
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

-- name: record
-- Records how a round ended. Of successful rounds that had nothing to do, records only one in idle_seconds; the row is read
-- first, so that the others cost no write. Lists rounds that did something or failed among the ended jobs.
with remembered as (
    insert into last_round as r (table_id, kind, began_at, ended_at, error, failures, failing_since)
    select t.table_id, %(kind)s, n.now - make_interval(secs => %(seconds)s), n.now, %(error)s::text,
        (%(error)s::text is not null)::integer, case when %(error)s::text is not null then n.now end
    from tables t
    cross join (select clock_timestamp() as now) n
    where t.table_id = %(table_id)s
        and (%(worked)s or %(error)s::text is not null or not exists (
            select from last_round l
            where l.table_id = %(table_id)s and l.kind = %(kind)s and l.error is null
                and l.ended_at > n.now - make_interval(secs => %(idle_seconds)s)
        ))
    on conflict (table_id, kind) do update set
        began_at = excluded.began_at,
        ended_at = excluded.ended_at,
        error = excluded.error,
        failures = case when excluded.error is null then 0 else r.failures + 1 end,
        failing_since = case when excluded.error is not null then coalesce(r.failing_since, excluded.ended_at) end
    returning table_id, began_at, ended_at
)
insert into ended_job (job_key, ended_at, kind_id, state, started_at, claimed_at, about, message, error, worker)
select gen_random_uuid(), r.ended_at, k.kind_id, case when %(error)s::text is null then 'COMPLETE' else 'FAILED' end,
    r.began_at, r.began_at, t.name, %(outcome)s::text, %(error)s::text, %(worker)s::text
from remembered r
join tables t using (table_id)
join job_kind k on k.name = %(job_kind)s
where %(worked)s or %(error)s::text is not null;

-- name: count_given_up
-- Counts a compaction job that is given up, even if its round fails. Its reason is the error of the table's compactions until
-- a round succeeds.
insert into last_round as r (table_id, kind, error, failing_since, given_up, given_up_reason, given_up_at)
select %(table_id)s, 'compaction', %(error)s, n.now, 1, %(error)s, n.now
from (select clock_timestamp() as now) n
on conflict (table_id, kind) do update set
    error = excluded.error,
    failing_since = coalesce(r.failing_since, excluded.failing_since),
    given_up = r.given_up + 1,
    given_up_reason = excluded.given_up_reason,
    given_up_at = excluded.given_up_at;

-- name: rounds
-- The ends of the last rounds of a table, and its given-up jobs.
select kind, began_at, ended_at, error, failures, failing_since, given_up, given_up_reason, given_up_at
from last_round
where table_id = %(table_id)s
order by kind;

-- name: failing
-- The number of kinds of rounds that fail, over all tables.
select count(*) from last_round where error is not null;

-- name: given_up
-- The number of compaction jobs of some tables that were given up so far.
select table_id, given_up
from last_round
where kind = 'compaction' and table_id = any(%(table_ids)s::integer[]);
