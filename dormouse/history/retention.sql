-- name: lock
-- Who lets a table's files go, and who holds those of a moment, come one after the other.
select from tables where table_id = %(table_id)s for no key update;

-- name: candidates
-- The newest cut after the truncation that so many bytes were ingested since, and that is so old; and the newest of these
-- that no named cut and no consumer is before. Of a consumer that is expired, nothing is held.
with fit as materialized (
    select c.cut_id, c.name, c.recorded_at, c.epoch, c.table_id
    from cut c
    left join truncation t using (table_id)
    where c.table_id = %(table_id)s and c.snapshot is not null and (c.cut_id <= t.cut_id) is not true
        and (%(bytes_now)s::numeric - c.bytes_till < %(byte_count)s::numeric) is not true
        and (c.recorded_at > clock_timestamp() - make_interval(secs => %(seconds)s)) is not true
)
(select f.*, false as is_free from fit f order by f.cut_id desc limit 1)
union all
(
    select f.*, true
    from fit f
    where not exists (
            select from cut c
            where c.table_id = f.table_id and c.name is not null and c.snapshot is not null and c.cut_id < f.cut_id
        )
        and not exists (
            select from consumer c
            join hold h on h.holder = concat('consumer ', c.table_id, '/', c.name) and h.until > clock_timestamp()
            where c.table_id = f.table_id and c.snapshot is not null and c.position_at < f.recorded_at
        )
    order by f.cut_id desc
    limit 1
);

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
