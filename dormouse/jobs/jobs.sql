-- name: kind
-- Returns the id of a kind, which is added if it is new.
with found as (
    select kind_id from job_kind where name = %(name)s
), made as (
    insert into job_kind (name)
    select %(name)s
    where not exists (select from found)
    -- another transaction was faster
    on conflict (name) do update set name = excluded.name
    returning kind_id
)
select kind_id from found union all select kind_id from made;

-- name: start
-- Adds a job, unless one of its id has not ended; returns when it started. Wakes a worker only if one sleeps, as a notification
-- takes a lock that makes commits wait for each other.
with started as (
    insert into job (job_key, kind_id, job_id, owner)
    values (%(job_key)s, %(kind_id)s, %(job_id)s, %(owner)s)
    on conflict (job_key) do nothing
    returning started_at
)
select started_at, {wake}
from started;

-- name: wake
-- Part of a query: notifies the workers of a kind, if any sleeps.
(
    select pg_notify('dormouse_jobs', %(kind_id)s::text)::text
    from job_worker
    where waits_until > clock_timestamp() and %(kind_id)s = any(kind_ids)
    limit 1
)

-- name: has_ended
-- Returns whether a job of this id has ended before. Runs after the job was added: a job of this id that ended meanwhile had to
-- be moved before the new one could be added, so this statement sees it.
select exists (select from ended_job where job_key = %(job_key)s);

-- name: works
-- Part of a query: true if worker a is believed to run kind k. A worker without a connection comes back within a minute after a
-- job is started; it has died if a job that was started since has waited longer.
a.lease_until > clock_timestamp() and k.kind_id = any(a.kind_ids) and (
    a.asleep_since is null or (
        select o.started_at
        from job o
        where o.kind_id = k.kind_id and o.worker_id is null
        order by o.job_number
        limit 1
    ) between a.asleep_since and clock_timestamp() - interval '1 minute' is not true
)

-- name: shown
-- Part of a query: the columns of a job that has not ended; w is its worker.
j.job_key, j.job_id, k.name as kind, 'PROCESSING' as state, j.owner, null::text as about, j.current, j.total, j.message,
    null::text as error, null::text as traceback, w.name as worker, j.token as attempts, j.is_cancelled,
    j.worker_id is not null or exists (select from job_worker a where {works}) as has_workers,
    j.started_at, j.claimed_at, j.told_at, null::timestamptz as ended_at

-- name: shown_ended
-- Part of a query: the columns of a job that has ended.
j.job_key, j.job_id, k.name as kind, j.state, j.owner, j.about, j.current, j.total, j.message, j.error, j.traceback,
    j.worker, j.token as attempts, false as is_cancelled, true as has_workers, j.started_at, j.claimed_at,
    null::timestamptz as told_at, j.ended_at

-- name: find
-- Returns a job. One statement looks in both tables, as a job that ends is moved from one to the other.
select {shown}
from job j
join job_kind k using (kind_id)
left join job_worker w on w.worker_id = j.worker_id
where j.job_key = %(job_key)s
union all
select {shown_ended}
from ended_job j
join job_kind k using (kind_id)
where j.job_key = %(job_key)s;

-- name: list
-- Returns jobs that have not ended, newest first, then the last ended ones; reads at most a page of each kind and state. A page
-- begins after the place of the last job of the page before.
with kinds as (
    select kind_id, name from job_kind where name = coalesce(%(kind)s, name)
), waiting as (
    select {shown}
    from kinds k
    cross join lateral (
        select *
        from job j
        where j.kind_id = k.kind_id and j.worker_id is null
            and j.owner is not distinct from coalesce(%(owner)s, j.owner)
            and {unended_after}
        order by j.job_number desc
        limit %(limit)s
    ) j
    left join job_worker w on w.worker_id = j.worker_id
    where coalesce(%(state)s, 'PROCESSING') = 'PROCESSING'
), running as (
    select {shown}
    from kinds k
    join job j on j.kind_id = k.kind_id and j.worker_id is not null
    left join job_worker w on w.worker_id = j.worker_id
    where coalesce(%(state)s, 'PROCESSING') = 'PROCESSING'
        and j.owner is not distinct from coalesce(%(owner)s, j.owner)
        and {unended_after}
), ended as (
    select {shown_ended}
    from kinds k
    cross join (values ('COMPLETE'), ('FAILED'), ('CANCELLED')) as s (state)
    cross join lateral (
        select *
        from ended_job e
        where e.kind_id = k.kind_id and e.state = s.state
            and {ended_after}
        order by e.ended_at desc
        limit %(limit)s
    ) j
    where s.state = coalesce(%(state)s, s.state) and %(owner)s::text is null
), own as (
    select {shown_ended}
    from (
        select *
        from ended_job e
        where e.owner = %(owner)s
            and e.kind_id in (select kind_id from kinds) and e.state = coalesce(%(state)s, e.state)
            and {ended_after}
        order by e.ended_at desc
        limit %(limit)s
    ) j
    join kinds k using (kind_id)
)
select *
from (
    select * from waiting union all select * from running union all select * from ended union all select * from own
) found
order by coalesce(ended_at, 'infinity') desc, started_at desc, job_key desc
limit %(limit)s;

-- name: unended_after
-- Part of a query: true if job j, which has not ended, comes after the place where a page begins. Only such jobs come before it.
(
    %(after_key)s::uuid is null or (
        %(after_ended)s::timestamptz = 'infinity' and (j.started_at, j.job_key) < (%(after_started)s::timestamptz, %(after_key)s)
    )
)

-- name: ended_after
-- Part of a query: true if job e, which has ended, comes after the place where a page begins.
(
    %(after_key)s::uuid is null
    or (e.ended_at, e.started_at, e.job_key) < (%(after_ended)s::timestamptz, %(after_started)s::timestamptz, %(after_key)s)
)

-- name: cancel
-- Ends a job that waits, or asks its worker to end it; returns whether it did one of both.
with gone as (
    delete from job where job_key = %(job_key)s and worker_id is null returning *
), ended as (
    insert into ended_job (job_key, ended_at, kind_id, token, state, started_at, job_id, owner, current, total, message)
    select job_key, clock_timestamp(), kind_id, token, 'CANCELLED', started_at, job_id, owner, current, total, message
    from gone
), asked as (
    update job set is_cancelled = true where job_key = %(job_key)s and worker_id is not null returning job_key
)
select (select count(*) from gone) + (select count(pg_notify('dormouse_jobs', 'cancelled')) from asked) > 0;

-- name: limit
-- Sets how many jobs of a kind run at once; notifies workers, as more may run now.
with changed as (
    update job_kind set running_max = %(running_max)s where kind_id = %(kind_id)s
)
select pg_notify('dormouse_jobs', 'limits');

-- name: kinds
-- Returns the kinds of jobs, with the workers of each, how long its oldest job has waited, and how many jobs ended lately.
select k.name, k.running_max,
    (
        select count(*)
        from (
            select from job j where j.kind_id = k.kind_id and j.worker_id is null limit %(counted_max)s
        ) w
    ),
    (select count(*) from job j where j.kind_id = k.kind_id and j.worker_id is not null),
    (
        select count(*) from job_worker a where {works}
    ),
    (
        select greatest(extract(epoch from clock_timestamp() - j.started_at), 0)::float8
        from job j
        where j.kind_id = k.kind_id and j.worker_id is null
        order by j.job_number
        limit 1
    ),
    (
        select jsonb_object_agg(s.state, (
            select count(*)
            from (
                select
                from ended_job e
                where e.kind_id = k.kind_id and e.state = s.state and e.ended_at > now() - interval '1 day'
                limit %(counted_max)s
            ) e
        ))
        from unnest(%(states)s::text[]) s (state)
    )
from job_kind k
where k.kind_id > 0
order by k.name;
