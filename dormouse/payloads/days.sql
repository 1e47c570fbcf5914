-- name: take
-- Takes a day for some work, or takes over work that another worker left. No row: another worker has the day, or no such
-- work can begin.
insert into payload_day as d (day, token, worker, leased_until, work, phase)
values (
    %(day)s, 1, %(worker)s, clock_timestamp() + make_interval(secs => %(lease_seconds)s), %(work)s, 'prepare'
)
on conflict (day) do update
set token = d.token + 1, worker = excluded.worker, leased_until = excluded.leased_until, work = excluded.work,
    phase = coalesce(d.phase, 'prepare'),
    payloads = case when d.work is null then 0 else d.payloads end,
    bytes_in = case when d.work is null then 0 else d.bytes_in end,
    bytes_out = case when d.work is null then 0 else d.bytes_out end,
    objects = case when d.work is null then 0 else d.objects end,
    seconds = case when d.work is null then 0 else d.seconds end
where (d.leased_until is null or d.leased_until < clock_timestamp())
    and (d.work = excluded.work or (d.work is null and d.state = any(%(states)s)))
returning token;

-- name: end_readers
-- Ends the sessions that still read a day for its former worker: a frozen worker would never release its locks.
-- Any role can take such a lock. Sessions that this role may not end do not belong to workers, and are skipped.
select pg_terminate_backend(l.pid)
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.classid = %(class)s and l.objid = %(number)s and l.pid <> pg_backend_pid()
    and l.database = (select oid from pg_database where datname = current_database())
    and (pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage'))
    and (select s.rolsuper from pg_roles s where s.rolname = current_user) >= (select u.rolsuper from pg_roles u where u.oid = a.usesysid);

-- name: mark_reader
-- Marks this session as a reader of a day for its worker, until the end of the transaction.
select pg_advisory_xact_lock_shared(%(class)s, %(number)s);

-- name: renew
-- Renews the lease of a day. No row: another worker has the day.
update payload_day set leased_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
where day = %(day)s and token = %(token)s and worker is not null
returning token;

-- name: release
-- Releases a day and records the error. The next worker that takes the day does the rest of the work.
update payload_day
set worker = null, leased_until = null, seconds = seconds + %(seconds)s, error = %(error)s,
    failed_at = case when %(error)s::text is not null then clock_timestamp() end, changed_at = clock_timestamp()
where day = %(day)s and token = %(token)s;

-- name: read
-- The record of a day.
select day, state, work, phase, token, worker, leased_until, after_kind, after_tenant, after_id, after_at,
    verified_till::text, payloads, bytes_in, bytes_out, objects, seconds, swap_lock_ms, error, failed_at, changed_at
from payload_day
where day = %(day)s;

-- name: advance
-- Records a phase and its progress, as the first statement of a transaction of the day's worker. The row's lock keeps other
-- workers from taking the day until the end. No row: another worker has the day. The timeout ends the transaction of a frozen
-- worker when its lease is over.
update payload_day
set phase = %(phase)s, after_kind = %(after_kind)s, after_tenant = %(after_tenant)s, after_id = %(after_id)s,
    after_at = %(after_at)s, payloads = payloads + %(payloads)s, bytes_in = bytes_in + %(bytes_in)s,
    bytes_out = bytes_out + %(bytes_out)s, objects = objects + %(objects)s,
    leased_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s), changed_at = clock_timestamp()
where day = %(day)s and token = %(token)s and worker is not null
returning set_config(
    'idle_in_transaction_session_timeout',
    least(
        round(1000 * %(lease_seconds)s),
        1000 * extract(epoch from nullif(current_setting('idle_in_transaction_session_timeout'), '0')::interval)
    )::integer::text,
    true
);

-- name: end
-- Records the end of the work on a day, and its new state.
update payload_day
set state = %(state)s, work = null, phase = null, after_kind = null, after_tenant = null, after_id = null, after_at = null,
    verified_till = null, changed_at = clock_timestamp()
where day = %(day)s and token = %(token)s and worker is not null
returning token;

-- name: days
-- The days that have a partition or a record: their estimated sizes, and the work on them.
with partition as (
    select to_date(right(c.relname, 8), 'YYYYMMDD') as day, greatest(c.reltuples, 0)::bigint as about,
        pg_total_relation_size(c.oid) as bytes
    from pg_inherits i
    join pg_class c on c.oid = i.inhrelid
    where i.inhparent = 'payload'::regclass and c.relname ~ '_\d{8}$'
), object as (
    select day, count(*) as objects, sum(byte_count)::bigint as bytes, sum(payloads)::bigint as payloads
    from payload_object
    where state in ('live', 'block')
    group by day
)
select coalesce(p.day, d.day) as day, coalesce(d.state, 'open'), d.work, d.phase, d.worker, d.leased_until,
    coalesce(p.about, 0), coalesce(p.bytes, 0), coalesce(o.objects, 0), coalesce(o.bytes, 0), coalesce(o.payloads, 0),
    d.payloads, d.bytes_in, d.bytes_out, d.seconds, d.swap_lock_ms, d.error, d.failed_at,
    coalesce(d.work = 'rehydrate' or d.rehydrated_at > clock_timestamp() - interval '1 day', false),
    coalesce(p.day, d.day) < (clock_timestamp() at time zone 'UTC')::date,
    -- it has been over for so long
    coalesce(p.day, d.day) < ((clock_timestamp() - make_interval(secs => %(hot_seconds)s)) at time zone 'UTC')::date
from partition p
full join payload_day d on d.day = p.day
left join object o on o.day = coalesce(p.day, d.day)
where p.day is not null or d.state <> 'expired' or %(expired)s
order by day;

-- name: has_rows
-- Whether a day has any rows.
select exists (select from {day});

-- name: count_rows
-- The number of rows of a day, counted up to a limit.
select count(*) from (select from {day} limit %(limit)s) some;

