-- Moments that are whole: what readers of an older snapshot must know of removals that are not in the log any more, and on a
-- standby when columns were changed.

alter table tables
    -- no removal that is not in the log any more is of a later transaction; null: none was dropped
    add column log_dropped_xid xid8,
    -- the last transaction that dropped some
    add column log_dropped_by xid8;

-- A standby's own snapshots tell of no transaction that is under way. Of those that a snapshot leaves in doubt, the ones
-- whose changes of a table are seen in it had committed, also of its columns; the others had not, or are none of that table's.
create or replace function replayed_snapshot(of_table integer) returns pg_snapshot
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
    union
    select s.added_xid
    from own o, schema_change s
    where s.table_id = of_table and s.added_xid >= o.xmin
    union
    select t.log_dropped_by
    from own o, tables t
    where t.table_id = of_table and t.log_dropped_by >= o.xmin
)
select concat(o.xmin, ':', o.xmax, ':', (
        select string_agg(x::text, ',' order by x)
        from generate_series(o.xmin::text::numeric, o.xmax::text::numeric - 1) x
        where x not in (select xid::text::numeric from seen)
    ))::pg_snapshot
from own o
$$;
