-- name: has_files
-- Whether any file is tracked, or ever was.
select exists (select from tracked_file) or exists (select from applied_commit);

-- name: keep
-- What is known at an adoption is not collected for so many days, whenever it lost its last reference.
insert into hold (holder, since, until)
values (concat('adoption ', %(number)s::bigint), 'epoch', clock_timestamp() + make_interval(secs => %(days)s * 86400))
on conflict (holder) do update set until = excluded.until;

-- name: forget_writers
-- Of a database that is adopted: nobody writes or works for it yet, and what others wrote is theirs to collect. Its cuts and
-- consumers are of the tables; these have all their time again, as nobody could read for them meanwhile.
with jobs as (
    update compaction_job set leased_until = '-infinity', run_id = null, run_until = '-infinity'
    where leased_until > '-infinity' or run_id is not null
),
messages as (update commit_message set visible_at = clock_timestamp() where visible_at > clock_timestamp()),
holds as (delete from hold where not starts_with(holder, 'cut ') and not starts_with(holder, 'consumer ')),
consumers as (
    update hold h
    set until = clock_timestamp() + (h.until - c.acknowledged_at)
    from consumer c
    where h.holder = concat('consumer ', c.table_id, '/', c.name)
)
delete from write_attempt;
