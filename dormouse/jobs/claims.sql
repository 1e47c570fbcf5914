-- name: register
-- Registers a worker that is ready to take jobs.
insert into job_worker (worker_id, kind_ids, name, lease_until, lease_seconds)
values (
    %(worker_id)s, %(kind_ids)s, %(name)s, clock_timestamp() + make_interval(secs => %(lease_seconds)s), %(lease_seconds)s
);

-- name: me
-- Part of a query: the worker, unless it was found dead; an expired lease alone does not matter. It is locked, so that no other
-- worker takes its jobs until this transaction ends.
select name from job_worker where worker_id = %(worker_id)s and lease_until > '-infinity' for share

-- name: any_number
-- Part of a query: the kinds without a limit, how many of each may be claimed, and the number from which they are searched, which
-- skips the index entries of claimed jobs that are not vacuumed yet.
select f.kind_id, f.free, f.since
from unnest(%(kind_ids)s::smallint[], %(free)s::integer[], %(since)s::bigint[]) as f (kind_id, free, since)
join job_kind k using (kind_id)
where k.running_max is null

-- name: limited
-- Part of a query: the kinds with a limit, and how many of each may be claimed.
select f.kind_id, 0 as since, greatest(0, least(
    f.free, k.running_max - (select count(*) from job r where r.kind_id = f.kind_id and r.worker_id is not null)
)) as free
from unnest(%(kind_ids)s::smallint[], %(free)s::integer[]) as f (kind_id, free)
join job_kind k using (kind_id)
where k.running_max is not null

-- name: lock_limits
-- Locks the kinds with a limit, so that the next statement counts the jobs that other workers claimed.
select k.kind_id
from job_kind k,
    (
        select set_config('idle_in_transaction_session_timeout', %(frozen_ms)s::text, true)
    ) as quick
where k.kind_id = any(%(kind_ids)s::smallint[]) and k.running_max is not null
order by k.kind_id
for update of k;

-- name: end_if_frozen
-- Comes first in a transaction: the server ends it, and its locks, if its process is frozen.
select set_config('idle_in_transaction_session_timeout', %(frozen_ms)s::text, true);

-- name: with_requests
-- Part of a query: claimed jobs, and the requests of those that started on a day, as long as these are hot.
select c.*, p.content::text
from claimed c
left join {day} p on p.kind = %(request)s and p.tenant = %(tenant)s
    and p.id = coalesce(c.job_id, c.job_key::text) and p.inserted_at = c.started_at

-- name: without_requests
-- Part of a query: claimed jobs.
select c.*, null from claimed c

-- name: claim
-- Claims waiting jobs, of each kind in the order of start; skips those that another worker is claiming.
with me as materialized (
    {me}
), wanted as materialized (
    {wanted}
), due as materialized (
    select j.job_key
    from wanted w
    cross join lateral (
        select j.job_key
        from job j
        where j.kind_id = w.kind_id and j.worker_id is null and j.job_number >= w.since
        order by j.job_number
        limit w.free
        for update skip locked
    ) j
    where exists (select from me)
), claimed as (
    update job j
    set worker_id = %(worker_id)s, token = j.token + 1, claimed_at = clock_timestamp(),
        current = null, total = null, message = null, told_at = null
    from due,
        -- the job is claimed again if a crash undoes this, so the worker need not wait for the disk
        (select set_config('synchronous_commit', 'off', true)) as quick
    where j.job_key = due.job_key
    returning j.job_key, j.job_id, j.kind_id, j.token, j.started_at, j.job_number, j.owner
)
{requests};

-- name: pulse
-- Renews the lease, unless the worker was found dead, and stores the progress of functions. Returns whether it renewed the lease,
-- and the jobs to cancel. An expired lease is renewed, too, while no other worker has taken the jobs.
with me as (
    update job_worker
    set lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
    from (select set_config('synchronous_commit', 'off', true)) as quick
    where worker_id = %(worker_id)s and lease_until > '-infinity'
    returning worker_id
), reported as (
    update job j
    set current = t.current, total = t.total, message = t.message, told_at = clock_timestamp()
    from unnest(%(job_keys)s::uuid[], %(currents)s::bigint[], %(totals)s::bigint[], %(messages)s::text[])
        as t (job_key, current, total, message)
    where j.job_key = t.job_key and j.worker_id = %(worker_id)s and exists (select from me)
)
select exists (select from me), array(
    select j.job_key
    from unnest(%(kind_ids)s::smallint[]) as k (kind_id)
    join job j on j.kind_id = k.kind_id and j.worker_id = %(worker_id)s
    where j.is_cancelled
);

-- name: keep
-- Part of a query: stores results.
, kept as (
    {put}
)

-- name: of_ended
-- Part of a query: only results of jobs that this statement ends, not of those that other workers have.
given.id in (select coalesce(job_id, job_key::text) || '/' || token from gone)

-- name: finish
-- Ends jobs, each only if it is still this worker's; returns those that ended. Wakes a worker where a limit made jobs wait.
with me as materialized (
    {me}
), gone as (
    delete from job j
    using me, unnest(%(job_keys)s::uuid[], %(tokens)s::integer[], %(states)s::text[], %(currents)s::bigint[],
        %(totals)s::bigint[], %(messages)s::text[], %(errors)s::text[], %(tracebacks)s::text[])
        as e (job_key, token, state, current, total, message, error, traceback)
    where j.job_key = e.job_key and j.token = e.token and j.worker_id = %(worker_id)s
    returning j.job_key, j.kind_id, j.token, j.started_at, j.claimed_at, j.job_id, j.owner, e.state, e.current, e.total,
        e.message, e.error, e.traceback, me.name
), ended as (
    insert into ended_job (job_key, ended_at, kind_id, token, state, started_at, claimed_at, job_id, owner, current, total,
        message, error, traceback, worker)
    select job_key, clock_timestamp(), kind_id, token, state, started_at, claimed_at, job_id, owner, current, total,
        message, error, traceback, name
    from gone
)
{kept}
select g.job_key, {wake_limited}
from gone g;

-- name: wake_limited
-- Part of a query: notifies the workers of a kind with a limit.
(
    select pg_notify('dormouse_jobs', k.kind_id::text)::text
    from job_kind k
    where k.kind_id = g.kind_id and k.running_max is not null and exists (
        select from job_worker w where w.waits_until > clock_timestamp() and k.kind_id = any(w.kind_ids)
    )
)

-- name: give_back
-- Makes the jobs of a worker wait again, except those that it runs; ends those that were cancelled. A job that is cancelled at
-- this moment stays with the worker, which is found dead later.
with back as (
    update job j
    set worker_id = null, claimed_at = null
    from unnest(%(kind_ids)s::smallint[]) as k (kind_id)
    where j.kind_id = k.kind_id and j.worker_id = %(worker_id)s and j.job_key <> all(%(running)s::uuid[])
        and not j.is_cancelled
    returning j.kind_id
), gone as (
    delete from job j
    using unnest(%(kind_ids)s::smallint[]) as k (kind_id)
    where j.kind_id = k.kind_id and j.worker_id = %(worker_id)s and j.job_key <> all(%(running)s::uuid[])
        and j.is_cancelled
    returning j.*
), ended as (
    insert into ended_job (job_key, ended_at, kind_id, token, state, started_at, claimed_at, job_id, owner, current, total,
        message, worker)
    select job_key, clock_timestamp(), kind_id, token, 'CANCELLED', started_at, claimed_at, job_id, owner, current, total,
        message, (select name from job_worker where worker_id = %(worker_id)s)
    from gone
)
select pg_notify('dormouse_jobs', kind_id::text)::text
from (select kind_id from back union select kind_id from gone) k;

-- name: suspect
-- Marks the workers whose lease is over. A worker that is alive has some time from now on to renew it, as the database may have
-- been out of reach when the lease ended. Returns whether there are any.
with noted as (
    update job_worker w
    set suspected_at = clock_timestamp()
    from (
        select worker_id
        from job_worker
        where lease_until > '-infinity' and lease_until <= clock_timestamp() and (suspected_at >= lease_until) is not true
        for update skip locked
    ) over
    where w.worker_id = over.worker_id
    returning w.worker_id
)
select count(*) from noted;

-- name: found_dead_at
-- Part of a query: when a worker w is taken for dead unless it renews its lease: half a lease after it was marked.
case when w.suspected_at >= w.lease_until
    then w.suspected_at + make_interval(secs => least(coalesce(w.lease_seconds, 30) / 2, %(grace_seconds_max)s))
    else w.lease_until end

-- name: take_over
-- Makes the jobs of dead workers wait again; ends those that were cancelled, or during which too many workers died. A dead
-- worker can never renew its lease.
with dead as materialized (
    select worker_id, kind_ids, name
    from job_worker w
    where lease_until > '-infinity' and lease_until <= clock_timestamp() and suspected_at >= lease_until
        and {found_dead_at} <= clock_timestamp()
    for update skip locked
), buried as (
    update job_worker w
    set lease_until = '-infinity', waits_until = '-infinity'
    from dead d
    where w.worker_id = d.worker_id
), lost as materialized (
    select j.job_key, j.token, d.worker_id, d.name, j.is_cancelled, j.is_cancelled or j.deaths + 1 >= %(deaths_max)s as ends
    from dead d
    cross join lateral unnest(d.kind_ids) as k (kind_id)
    join job j on j.kind_id = k.kind_id and j.worker_id = d.worker_id
), again as (
    update job j
    set worker_id = null, claimed_at = null, deaths = j.deaths + 1, dead_workers = j.dead_workers || l.worker_id
    from lost l
    where j.job_key = l.job_key and j.worker_id = l.worker_id and not l.ends
    returning j.kind_id
), gone as (
    delete from job j
    using lost l
    where j.job_key = l.job_key and j.worker_id = l.worker_id and l.ends
    returning j.*, l.name, l.is_cancelled as is_wanted
), ended as (
    insert into ended_job (job_key, ended_at, kind_id, token, state, started_at, claimed_at, job_id, owner, current, total,
        message, error, worker)
    select job_key, clock_timestamp(), kind_id, token, case when is_wanted then 'CANCELLED' else 'FAILED' end, started_at,
        claimed_at, job_id, owner, current, total, message,
        case when not is_wanted then format('the processes of %s workers that ran it died, the last was %s', deaths + 1, name) end,
        name
    from gone
)
select (select count(*) from again), (select count(*) from gone),
    -- also for jobs that ended, as their place under a limit is free now
    (
        select count(pg_notify('dormouse_jobs', kind_id::text))
        from (select kind_id from again union select kind_id from gone) k
    );

-- name: lives
-- Takes back the death of a worker that is alive after all from the counts of its jobs.
update job
set deaths = greatest(deaths - 1, 0), dead_workers = array_remove(dead_workers, %(worker_id)s)
where job_key = any(%(job_keys)s::uuid[]) and %(worker_id)s = any(dead_workers);

-- name: look
-- Renews the lease of a worker without work, and records how long it sleeps. Returns whether it is alive (not found dead), in how
-- many seconds the next worker with jobs may be found dead, and which of its kinds have a limit.
with me as (
    update job_worker
    set lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s),
        waits_until = clock_timestamp() + make_interval(secs => %(wait_seconds)s), asleep_since = null
    from (select set_config('synchronous_commit', 'off', true)) as quick
    where worker_id = %(worker_id)s and lease_until > '-infinity'
    returning worker_id
)
select exists (select from me), (
    select extract(epoch from min({found_dead_at}) - clock_timestamp())::float8
    from job_worker w
    where w.worker_id <> %(worker_id)s and w.lease_until > '-infinity' and exists (
        select
        from unnest(w.kind_ids) as k (kind_id)
        join job j on j.kind_id = k.kind_id and j.worker_id = w.worker_id
    )
), array(select kind_id from job_kind where kind_id = any(%(kind_ids)s::smallint[]) and running_max is not null);

-- name: awake
-- Records that the worker works and needs no notifications; its lease is short again, so that its jobs are soon taken over.
update job_worker
set lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s), waits_until = '-infinity', asleep_since = null
from (select set_config('synchronous_commit', 'off', true)) as quick
where worker_id = %(worker_id)s and lease_until > '-infinity';

-- name: sleep
-- Records that the worker has no job and closes its connection; it comes back within this time.
update job_worker
set lease_until = clock_timestamp() + make_interval(secs => %(seconds)s), waits_until = '-infinity',
    asleep_since = clock_timestamp()
where worker_id = %(worker_id)s and lease_until > '-infinity';

-- name: leave
-- Deletes a worker that ends and has no job, and dead workers without jobs after some time.
delete from job_worker w
where (
        w.worker_id = %(worker_id)s
        or w.lease_until < clock_timestamp() - make_interval(secs => %(forget_seconds)s)
    )
    and not exists (
        select
        from unnest(w.kind_ids) as k (kind_id)
        join job j on j.kind_id = k.kind_id and j.worker_id = w.worker_id
    );

-- name: page
-- Returns a page of the jobs of a day after a given one, without rounds of tables.
select e.job_key, e.job_id, k.name, e.token, e.started_at
from {day} e
join job_kind k using (kind_id)
where e.job_key > %(after)s and e.kind_id > 0
order by e.job_key
limit %(limit)s;

-- name: forget
-- Deletes jobs of a day, after their payloads and objects.
delete from {day} where job_key = any(%(job_keys)s);

-- name: held_since
-- Returns the day of the earliest hold; null if there is none.
select (min(since) at time zone 'UTC')::date from hold where until > clock_timestamp() and table_id is null;

-- name: late_days
-- Returns the days of ended jobs that had no partition in time.
select distinct (ended_at at time zone 'UTC')::date from ended_job_default;
