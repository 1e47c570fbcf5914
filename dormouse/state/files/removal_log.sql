-- name: date_back
-- Sets the time of removals that a wrong clock dated into the far future to now.
update removal set removed_at = clock_timestamp() where removed_at >= %(first_day)s::timestamptz;

-- name: days_without_partition
-- The days of removals for which no partition was made in time.
select distinct (removed_at at time zone 'UTC')::date from removal_default;

-- name: lock_day
-- Locks a day of the log against writers and against other processes that would drop it; readers go on.
lock table {day} in share row exclusive mode;

-- name: lock_log
-- Locks the log against readers, so that a day can be dropped.
lock table only removal in access exclusive mode;

-- name: lock_tables
-- Locks the tables that have removals of a day, against transactions that begin to hold a moment of them.
select from tables where table_id in (select table_id from {day}) order by table_id for no key update;

-- name: still_needed
-- Whether some table still needs removals of a day: for its history, for a held moment, because they were not collected or
-- counted yet, or because no full count was made since. A full count finds lost references of files added on that day.
select exists (
    select from {day} r
    join tables t using (table_id)
    left join watermark w on w.table_id = t.table_id and w.purpose = 'totals' and w.whole_at is not null
    where r.removed_at > clock_timestamp() - make_interval(
            secs => coalesce((t.properties ->> 'history_retention_seconds')::float8, %(retention_seconds)s)
                + %(margin_seconds)s
        )
        or exists (
            select from hold h
            where h.until > clock_timestamp() and (h.table_id is null or h.table_id = r.table_id)
                and not pg_visible_in_snapshot(r.removed_xid, h.snapshot)
        )
        or not pg_visible_in_snapshot(r.removed_xid, t.collected_till)
        or not pg_visible_in_snapshot(r.removed_xid, w.till)
        -- the count was made up to a while before its time was stored
        or r.removed_at > w.whole_at - interval '1 hour'
);

-- name: note_dropped
-- Records that the log is incomplete until one day after the end of a dropped day that has removals. The extra day is for a
-- clock that was set back: files added on the later day may have removals that are dated on the earlier day.
update instance set removals_since = greatest(removals_since, {to_day}::timestamptz + interval '1 day')
where exists (select from {day});

-- name: note_history
-- Records for the tables that have removals of a dropped day that moments before cannot be read, except held ones. The margin
-- covers the time until the removals were committed. Holders of the files of all tables do not need the log.
update tables t
set log_dropped_xid = greatest(t.log_dropped_xid, r.last_xid::text::xid8), log_dropped_by = pg_current_xact_id(),
    log_since = greatest(t.log_since, r.last + make_interval(secs => %(margin_seconds)s)),
    history_since = greatest(t.history_since, least(
    r.last + make_interval(secs => %(margin_seconds)s),
    (
        -- a consumer's hold begins some time before its position
        select min(since + make_interval(secs => case when starts_with(h.holder, 'consumer ') then %(margin_seconds)s else 0 end))
        from hold h
        where h.until > clock_timestamp() and h.table_id = t.table_id
    )
))
from (
    select table_id, max(removed_at) as last, max(removed_xid::text::numeric) as last_xid from {day} group by table_id
) r
where t.table_id = r.table_id;
