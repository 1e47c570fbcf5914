-- name: kind
-- The id of a kind, which is made when there is none.
with found as (
    select kind_id from job_kind where name = %(name)s
), made as (
    insert into job_kind (name)
    select %(name)s
    where not exists (select from found)
    -- another was faster
    on conflict (name) do update set name = excluded.name
    returning kind_id
)
select kind_id from found union all select kind_id from made;

-- name: start
-- Adds a job, unless its id is one's that has not ended; gives when it started. Wakes a worker that sleeps: a notification
-- makes commits queue up, so only then.
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
-- Whether a job of this id has ended. Asked after it was added, and so seen: one of the id that ended meanwhile had to be
-- gone before.
select exists (select from ended_job where job_key = %(job_key)s);

-- name: works
-- Part of a query: whether worker a is taken to work on kind k. One that has no connection comes back within a minute after a
-- job was started: it died when one that was started since waits for longer.
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
-- Part of a query: a job that has not ended, as it is told of; w is its worker.
j.job_key, j.job_id, k.name as kind, 'PROCESSING' as state, j.owner, null::text as about, j.current, j.total, j.message,
    null::text as error, null::text as traceback, w.name as worker, j.token as attempts, j.is_cancelled,
    j.worker_id is not null or exists (select from job_worker a where {works}) as has_workers,
    j.started_at, j.claimed_at, j.told_at, null::timestamptz as ended_at

-- name: shown_ended
-- Part of a query: a job that has ended.
j.job_key, j.job_id, k.name as kind, j.state, j.owner, j.about, j.current, j.total, j.message, j.error, j.traceback,
    j.worker, j.token as attempts, false as is_cancelled, true as has_workers, j.started_at, j.claimed_at,
    null::timestamptz as told_at, j.ended_at

-- name: find
-- A job: in one moment, as one that ends is moved.
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
-- The jobs that have not ended, newest first, then those that ended last: of each kind and state so many at most. A page
-- begins after a job of the page before, by its place.
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
-- Part of a query: whether job j, which has not ended, stands after the place where a page begins; before it are no others
-- than such jobs.
(
    %(after_key)s::uuid is null or (
        %(after_ended)s::timestamptz = 'infinity' and (j.started_at, j.job_key) < (%(after_started)s::timestamptz, %(after_key)s)
    )
)

-- name: ended_after
-- Part of a query: whether job e, which has ended, stands after the place where a page begins.
(
    %(after_key)s::uuid is null
    or (e.ended_at, e.started_at, e.job_key) < (%(after_ended)s::timestamptz, %(after_started)s::timestamptz, %(after_key)s)
)

-- name: cancel
-- Ends a job that waits, or asks its worker to end it: gives whether one of both.
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
-- How many of a kind run at once; tells workers, as it may be more than before.
with changed as (
    update job_kind set running_max = %(running_max)s where kind_id = %(kind_id)s
)
select pg_notify('dormouse_jobs', 'limits');

-- name: kinds
-- The kinds, the workers of each, how long its oldest waiting job waits, and how many of its jobs ended lately.
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
