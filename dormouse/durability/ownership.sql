-- name: has_files
-- Returns whether any file is tracked, or ever was.
select exists (select from tracked_file) or exists (select from applied_commit);

-- name: keep
-- Adds a hold on all files that the database knows at an adoption, for some days, whenever they lost their last reference.
insert into hold (holder, since, until)
values (concat('adoption ', %(number)s::bigint), 'epoch', clock_timestamp() + make_interval(secs => %(days)s * 86400))
on conflict (holder) do update set until = excluded.until;

-- name: forget_writers
-- Ends all work in a database that is adopted: no process writes or works for it yet. Deletes write attempts, whose objects the
-- previous owner collects. Ends all leases: of row tables, jobs, days of payloads, compaction jobs and sleeping committers. Cuts
-- and consumers stay; consumers get their whole expiry time again, as they could not be read meanwhile.
with row_locks as (delete from row_lock),
workers as (delete from job_worker),
running as (update job set worker_id = null, claimed_at = null where worker_id is not null),
payload_days as (
    update payload_day set token = token + 1, worker = null, leased_until = null
    where worker is not null or leased_until is not null
),
waiters as (delete from commit_waiter),
jobs as (
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

-- name: pass
-- Passes the milestone after this one; returns its id, or no row if another process was faster.
update incarnation
set milestone = milestone + 1, milestone_id = gen_random_uuid(),
    passed_at = clock_timestamp(), passed_in = pg_current_snapshot()
where number = %(number)s and milestone = %(milestone)s
    and confirmed and number = (select max(number) from incarnation)
returning replace(milestone_id::text, '-', '');
