-- name: has_files
-- Whether any file is tracked, or ever was.
select exists (select from tracked_file) or exists (select from applied_commit);

-- name: keep
-- What is known at an adoption is not collected for so many days, whenever it lost its last reference.
insert into hold (holder, since, until)
values (concat('adoption ', %(number)s::bigint), 'epoch', clock_timestamp() + make_interval(secs => %(days)s * 86400))
on conflict (holder) do update set until = excluded.until;

-- name: forget_writers
-- Of a database that is adopted: nobody writes or works for it yet, and what others wrote is theirs to collect.
with jobs as (
    update compaction_job set leased_until = '-infinity', run_id = null, run_until = '-infinity'
    where leased_until > '-infinity' or run_id is not null
),
messages as (update commit_message set visible_at = clock_timestamp() where visible_at > clock_timestamp()),
holds as (delete from hold)
delete from write_attempt;
