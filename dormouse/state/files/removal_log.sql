-- name: date_back
-- Dates removals of days that are not made ahead, by a clock that went wrong, to now: none was made in the future.
update removal set removed_at = clock_timestamp() where removed_at >= %(first_day)s::timestamptz;

-- name: days_without_partition
-- The days of the removals that no partition was made for in time.
select distinct (removed_at at time zone 'UTC')::date from removal_default;

-- name: lock_day
-- Waits for the writers of a day, and keeps others out, and others that would drop it; it can be read.
lock table {day} in share row exclusive mode;

-- name: lock_log
-- Waits for who reads the log, and keeps others out: from here on a day can be dropped.
lock table only removal in access exclusive mode;

-- name: lock_tables
-- Waits for who holds a moment of the tables that have removals of a day, and keeps others out.
select from tables where table_id in (select table_id from {day}) order by table_id for no key update;

-- name: still_needed
-- Whether some table keeps removals of a day: for its history, for a moment that is held, or because they were not collected
-- or counted yet, or all was not counted again since: that finds references which are lost of files that came on that day.
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
        -- it was counted a while before that was remembered
        or r.removed_at > w.whole_at - interval '1 hour'
);

-- name: note_dropped
-- Notes that removals are not all in the log before the end of a day that has any; and of a day more, as what was added by
-- a clock that was set back then may be removed on the day before.
update instance set removals_since = greatest(removals_since, {to_day}::timestamptz + interval '1 day')
where exists (select from {day});

-- name: note_history
-- Of the tables that have removals of a day: what they removed was committed a while later at the latest, and moments
-- before cannot be read any more; a moment that is held can. Who holds the files of all tables does not need the log.
update tables t
set log_dropped_xid = greatest(t.log_dropped_xid, r.last_xid::text::xid8), log_dropped_by = pg_current_xact_id(),
    log_since = greatest(t.log_since, r.last + make_interval(secs => %(margin_seconds)s)),
    history_since = greatest(t.history_since, least(
    r.last + make_interval(secs => %(margin_seconds)s),
    (
        -- a consumer's files are held from a while before its position
        select min(since + make_interval(secs => case when starts_with(h.holder, 'consumer ') then %(margin_seconds)s else 0 end))
        from hold h
        where h.until > clock_timestamp() and h.table_id = t.table_id
    )
))
from (
    select table_id, max(removed_at) as last, max(removed_xid::text::numeric) as last_xid from {day} group by table_id
) r
where t.table_id = r.table_id;
