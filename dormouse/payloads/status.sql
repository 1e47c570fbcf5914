-- name: days
-- The days that have a partition, or that something was done with: about how much they have, and what is being done.
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
    -- its end was so long ago
    coalesce(p.day, d.day) < ((clock_timestamp() - make_interval(secs => %(hot_seconds)s)) at time zone 'UTC')::date
from partition p
full join payload_day d on d.day = p.day
left join object o on o.day = coalesce(p.day, d.day)
where p.day is not null or d.state <> 'expired' or %(expired)s
order by day;

-- name: has_rows
-- Whether a day has anything.
select exists (select from {day});

-- name: count_rows
-- How many rows a day has, up to a limit.
select count(*) from (select from {day} limit %(limit)s) some;

