-- Moments that can be told: those around a restore, where the clock was set back, and on a standby.

-- Restores have a place among deletions and files, so that changes across them can be told.
alter table restored
    -- counts those of the table
    add column number bigint,
    -- the last deletion of before
    add column deletion_id bigint,
    add column epoch bigint,
    -- the moment of it, while nothing else changes the table; null: by an older Dormouse, or in another cluster
    add column snapshot pg_snapshot;

-- What the clock said when an epoch was made, where it had been set back, so that its time is not that; else null.
alter table epoch add column clock_at timestamptz;
create index epoch_set_back on epoch (table_id, epoch) where clock_at is not null;

-- A standby's own snapshots tell of no transaction that is under way. Of those that a snapshot leaves in doubt, the ones
-- whose changes of a table are seen in it had committed; the others had not, or are none of that table's.
create function replayed_snapshot(of_table integer) returns pg_snapshot
language sql stable as $$
with own as materialized (
    select pg_snapshot_xmin(s) as xmin, pg_snapshot_xmax(s) as xmax from pg_current_snapshot() s
), seen as materialized (
    select r.added_xid as xid
    from own o, file_reference r
    where r.table_id = of_table and r.partition_id <> '' and r.added_xid >= o.xmin
    union
    select x.xid
    from own o, removal g, unnest(g.removed_xid || g.added_xids) as x (xid)
    where g.table_id = of_table and g.removed_xid >= o.xmin and x.xid >= o.xmin
    union
    select x.xid
    from own o, deletion d, unnest(array[d.added_xid, d.retired_xid]) as x (xid)
    where d.table_id = of_table and x.xid >= o.xmin
)
select concat(o.xmin, ':', o.xmax, ':', (
        select string_agg(x::text, ',' order by x)
        from generate_series(o.xmin::text::numeric, o.xmax::text::numeric - 1) x
        where x not in (select xid::text::numeric from seen)
    ))::pg_snapshot
from own o
$$;
