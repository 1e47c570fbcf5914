-- name: lock
-- Who lets a table's files go, and who holds those of a moment, come one after the other.
select from tables where table_id = %(table_id)s for no key update;

-- name: candidates
-- The newest cut after the truncation that so many bytes were ingested since, and that is so old; and the newest of these
-- that no named cut and no consumer is before. Of a consumer that is expired, nothing is held. Cuts have times in their order:
-- each is looked up from the time on that it can have, back to where the bytes are enough.
with limits as materialized (
    select t.table_id, u.recorded_at as truncated_at,
        coalesce(clock_timestamp() - make_interval(secs => %(seconds)s), 'infinity') as old_at,
        %(bytes_now)s::numeric - %(byte_count)s::numeric as bytes_till, (
            select min(n.recorded_at)
            from (
                select recorded_at from cut c
                where c.table_id = t.table_id and c.name is not null and c.snapshot is not null
                offset 0
            ) n
        ) as named_at, (
            select min(c.position_at)
            from consumer c
            join hold h on h.holder = concat('consumer ', c.table_id, '/', c.name) and h.until > clock_timestamp()
            where c.table_id = t.table_id and c.snapshot is not null
        ) as consumed_at
    from tables t
    left join truncation u using (table_id)
    where t.table_id = %(table_id)s
)
select f.*, w.is_free
from limits l
cross join lateral (
    values (false, l.old_at), (true, least(l.old_at, l.named_at, l.consumed_at))
) as w (is_free, before)
cross join lateral (
    select c.cut_id, c.name, c.recorded_at, c.epoch, c.table_id
    from cut c
    where c.table_id = l.table_id and c.snapshot is not null and c.recorded_at <= w.before
        and c.recorded_at > coalesce(l.truncated_at, '-infinity') and (c.bytes_till > l.bytes_till) is not true
    order by c.recorded_at desc
    limit 1
) f;

-- name: holders
-- The named cuts and consumers that hold files and history of a table, the oldest position first. A cut of another cluster,
-- and a consumer that is expired, hold nothing.
select 'cut' as kind, c.name, c.recorded_at as since, null::timestamptz as until
from cut c
where c.table_id = %(table_id)s and c.name is not null and c.snapshot is not null
union all
select 'consumer', c.name, c.position_at, h.until
from consumer c
join hold h on h.holder = concat('consumer ', c.table_id, '/', c.name) and h.until > clock_timestamp()
where c.table_id = %(table_id)s and c.snapshot is not null
order by since, kind, name;

-- name: truncation
-- The cut at which a table is truncated, and its epoch.
select cut_id, recorded_at, epoch from truncation where table_id = %(table_id)s and snapshot is not null;

-- name: truncate
-- Makes what lies before a cut unreadable.
insert into truncation as t (table_id, cut_id, epoch, snapshot, recorded_at)
select table_id, cut_id, epoch, snapshot, recorded_at
from cut
where table_id = %(table_id)s and cut_id = %(cut_id)s and snapshot is not null
on conflict (table_id) do update
set cut_id = excluded.cut_id, epoch = excluded.epoch, snapshot = excluded.snapshot, recorded_at = excluded.recorded_at,
    truncated_at = clock_timestamp()
returning cut_id;

-- name: forget_cuts
-- Forgets the cuts without a name up to one, and what they hold; gives how many.
with gone as (
    delete from cut
    where table_id = %(table_id)s and name is null and cut_id <= %(last)s
    returning cut_id
), released as (
    delete from hold where holder in (select concat('cut ', %(table_id)s, '/', cut_id) from gone)
)
select count(*) from gone;

-- name: count_cuts
-- How many cuts without a name there are up to one.
select count(*) from cut where table_id = %(table_id)s and name is null and cut_id <= %(last)s;

-- name: last_cut
-- What was ingested till the last cut, and where it is.
select bytes_till, epoch, snapshot::text, recorded_at
from cut
where table_id = %(table_id)s and snapshot is not null
order by cut_id desc
limit 1;
