-- name: may_roll
-- Whether the session may make and drop partitions of the log.
select pg_has_role(relowner, 'usage') from pg_class where oid = 'removed_reference'::regclass;

-- name: days
-- The days that the log has a partition for.
select c.relname
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'removed_reference'::regclass and c.relname ~ '^removed_reference_\d{8}$'
order by c.relname;

-- name: add_day
-- Makes the log's partition of one day.
create table {day} partition of removed_reference for values from ({from_day}) to ({to_day});

-- name: lock_day
-- Waits for the writers of a day, and keeps others out.
lock table {day} in access exclusive mode;

-- name: still_needed
-- Whether some table keeps removals of a day, for its history, or because they were not collected or counted yet.
select exists (
    select from {day} r
    join tables t using (table_id)
    left join watermark w on w.table_id = t.table_id and w.purpose = 'totals' and w.whole_at is not null
    where r.removed_at > clock_timestamp() - make_interval(
            secs => coalesce((t.properties ->> 'history_retention_seconds')::float8, %(retention_seconds)s)
        )
        or not pg_visible_in_snapshot(r.removed_xid, t.collected_till)
        or not pg_visible_in_snapshot(r.removed_xid, w.till)
);

-- name: forget_totals
-- Forgets totals that were not brought forward for long: the log is not kept for them.
update watermark
set whole_at = null, version = version + 1
where purpose = 'totals' and whole_at is not null and looked_at < clock_timestamp() - interval '2 days';

-- name: drop_day
-- Drops the log's partition of one day.
drop table {day};
