-- name: seconds_ahead
-- Returns by how many seconds a stored time is later than it can be by the present clock, at most; null if none is so by more
-- than the margin.
select max(seconds)
from (
    select extract(epoch from max(leased_until) - clock_timestamp())::float8 - %(row_lock)s as seconds from row_lock
    union all
    select extract(epoch from max(leased_until) - clock_timestamp())::float8 - %(payload_day)s from payload_day
    union all
    select extract(epoch from max(rehydrated_at) - clock_timestamp())::float8 from payload_day
    union all
    select max(
        extract(epoch from lease_until - clock_timestamp())::float8 - coalesce(lease_seconds, %(worker)s)
            - case when asleep_since is null and lease_seconds is not null then %(worker_idle)s else %(worker_asleep)s end
    )
    from job_worker
    union all
    -- only the last of each table, by the index
    select extract(epoch from j.leased_until - clock_timestamp())::float8 - %(compaction)s
    from tables t
    cross join lateral (
        select leased_until from compaction_job c where c.table_id = t.table_id order by leased_until desc limit 1
    ) j
    union all
    select extract(epoch from max(run_until) - clock_timestamp())::float8 - %(run)s
    from compaction_job
    where run_id is not null and run_until > clock_timestamp()
    union all
    select extract(epoch from max(greatest(since, until - make_interval(secs => %(hold)s))) - clock_timestamp())::float8
    from hold
    where split_part(holder, ' ', 1) not in ('cut', 'consumer', 'adoption') and not starts_with(holder, 'metadata backup ')
        and until < 'infinity'
    union all
    select extract(epoch from max(greatest(since, until - make_interval(secs => %(metadata_backup)s))) - clock_timestamp())::float8
    from hold
    where starts_with(holder, 'metadata backup ')
    union all
    select extract(epoch from max(since) - clock_timestamp())::float8
    from hold
    where split_part(holder, ' ', 1) in ('cut', 'consumer')
    union all
    select extract(epoch from max(greatest(history_since, log_since)) - clock_timestamp())::float8 from tables
    union all
    select extract(epoch from max(recorded_at) - clock_timestamp())::float8 from truncation
    union all
    select extract(epoch from max(removals_since) - interval '1 day' - clock_timestamp())::float8 from instance
    union all
    select extract(epoch from max(greatest(started_at, abandoned_at, finished_at)) - clock_timestamp())::float8 from write_attempt
    union all
    select extract(epoch from max(greatest(whole_at, looked_at)) - clock_timestamp())::float8 from watermark
    union all
    select extract(epoch from max(read_at) - clock_timestamp())::float8 from deletion
    union all
    select extract(epoch from max(ended_at) - clock_timestamp())::float8 from last_round
    union all
    select extract(epoch from max(used_at) - clock_timestamp())::float8 from row_index
) ahead
having max(seconds) > %(margin)s
union all
select null
limit 1;

-- name: alone
-- Waits for another process that restarts leases.
select pg_advisory_xact_lock(7236154098213004);

-- name: lease_of_row_lock
-- Restarts the locks of row tables.
update row_lock set leased_until = clock_timestamp() + make_interval(secs => %(row_lock)s)
where leased_until > clock_timestamp() + make_interval(secs => %(row_lock)s + %(margin)s);

-- name: lease_of_payload_day
-- Restarts the leases of days of payloads.
update payload_day set leased_until = clock_timestamp() + make_interval(secs => %(payload_day)s)
where leased_until > clock_timestamp() + make_interval(secs => %(payload_day)s + %(margin)s);

-- name: lease_of_job_worker
-- Restarts the leases of workers.
update job_worker
set lease_until = clock_timestamp() + make_interval(secs => s.seconds), suspected_at = null,
    asleep_since = case when asleep_since > clock_timestamp() then clock_timestamp() else asleep_since end, waits_until = least(waits_until, clock_timestamp()),
    since = least(since, clock_timestamp())
from (
    select worker_id, coalesce(lease_seconds, %(worker)s)
        + case when asleep_since is null and lease_seconds is not null then %(worker_idle)s else %(worker_asleep)s end as seconds
    from job_worker
) s
where job_worker.worker_id = s.worker_id
    and lease_until > clock_timestamp() + make_interval(secs => s.seconds + %(margin)s);

-- name: lease_of_compaction_job
-- Restarts the leases of compaction jobs, and the time for which they belong to a run.
update compaction_job
set leased_until = least(leased_until, clock_timestamp() + make_interval(secs => %(compaction)s)),
    run_until = least(run_until, clock_timestamp() + make_interval(secs => %(run)s))
where leased_until > clock_timestamp() + make_interval(secs => %(compaction)s + %(margin)s)
    or run_until > clock_timestamp() + make_interval(secs => %(run)s + %(margin)s);

-- name: lease_of_hold
-- Restarts holds. A hold that began under the wrong clock covers files that lose their last reference from now on, and ends
-- earlier by as much as its beginning moved. A hold that was only renewed then ends after its usual time.
update hold
set since = case when since > clock_timestamp() + make_interval(secs => %(margin)s)
        then clock_timestamp() - make_interval(secs => %(hold_margin)s) else since end,
    until = case
        when until = 'infinity' then until
        when starts_with(holder, 'metadata backup ')
        then least(until, clock_timestamp() + make_interval(secs => %(metadata_backup)s))
        when split_part(holder, ' ', 1) not in ('cut', 'consumer', 'adoption')
        then least(until, clock_timestamp() + make_interval(secs => %(hold)s))
        when since > clock_timestamp() + make_interval(secs => %(margin)s) then until - (since - clock_timestamp())
        else until
    end
where since > clock_timestamp() + make_interval(secs => %(margin)s)
    or until > clock_timestamp() + make_interval(
            secs => %(margin)s + case when starts_with(holder, 'metadata backup ') then %(metadata_backup)s else %(hold)s end
        )
        and split_part(holder, ' ', 1) not in ('cut', 'consumer', 'adoption');

-- name: time_of_history
-- Lets tables be read from now on. Files that were collected under the wrong clock lost their last reference before now, and
-- files that lose it from now on are kept.
update tables
set history_since = case when history_since > clock_timestamp() then clock_timestamp() else history_since end,
    log_since = case when log_since > clock_timestamp() then clock_timestamp() else log_since end
where history_since > clock_timestamp() or log_since > clock_timestamp();

-- name: time_of_truncation
-- Dates truncations back to now, if the wrong clock dated them.
update truncation set recorded_at = clock_timestamp() where recorded_at > clock_timestamp();

-- name: time_of_removals
-- Notes until when removals may be missing from the log. Those of a dropped day are from before now; one day is added for
-- safety.
update instance set removals_since = clock_timestamp() + interval '1 day'
where removals_since > clock_timestamp() + interval '1 day';

-- name: time_of_write_attempt
-- Dates the beginning and end of write attempts back to now.
update write_attempt
set started_at = least(started_at, clock_timestamp()),
    abandoned_at = case when abandoned_at > clock_timestamp() then clock_timestamp() else abandoned_at end,
    finished_at = case when finished_at > clock_timestamp() then clock_timestamp() else finished_at end
where greatest(started_at, abandoned_at, finished_at) > clock_timestamp() + make_interval(secs => %(margin)s);

-- name: time_of_watermark
-- Makes tables that were examined under the wrong clock due for a complete examination.
update watermark
set whole_at = case when whole_at > clock_timestamp() + make_interval(secs => %(margin)s)
        then clock_timestamp() - interval '1 day' else whole_at end,
    looked_at = least(looked_at, clock_timestamp())
where greatest(whole_at, looked_at) > clock_timestamp() + make_interval(secs => %(margin)s);

-- name: time_of_deletion
-- Makes files be read again for rows of deletions.
update deletion set read_at = null where read_at > clock_timestamp() + make_interval(secs => %(margin)s);

-- name: time_of_last_round
-- Dates rounds back to now.
update last_round set began_at = least(began_at, clock_timestamp()), ended_at = clock_timestamp()
where ended_at > clock_timestamp() + make_interval(secs => %(margin)s);

-- name: time_of_rehydrated_day
-- Keeps rehydrated days of payloads for the full time from now on.
update payload_day set rehydrated_at = clock_timestamp()
where rehydrated_at > clock_timestamp() + make_interval(secs => %(margin)s);

-- name: time_of_row_index
-- Dates the last use of row indexes back to now; a use counts less with each hour since.
update row_index set used_at = clock_timestamp() where used_at > clock_timestamp() + make_interval(secs => %(margin)s);

-- name: record
-- Records a jump of the clock.
insert into clock_jump (seconds, leases, times) values (%(seconds)s, %(leases)s, %(times)s)
returning found_at, seconds, leases, times;

-- name: jumps
-- Returns the recent jumps, the latest first.
select found_at, seconds, leases, times
from clock_jump
where found_at between clock_timestamp() - make_interval(secs => %(seconds)s)
    and clock_timestamp() + make_interval(secs => %(margin)s)
order by found_at desc;

-- name: own_session
-- Returns the process of this session, and when it began, because process ids are reused.
select pid, backend_start from pg_stat_activity where pid = pg_backend_pid();

-- name: end_session
-- Ends a session that this process had and lost, if the server has not noticed that yet; waits for its end.
select pg_terminate_backend(pid, 5000)
from pg_stat_activity
where pid = %(pid)s and backend_start = %(began)s and pid <> pg_backend_pid();
