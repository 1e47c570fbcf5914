-- name: number_alone
-- Takes the right to number rows of the table, unless another load has it; the lock ends with the transaction.
select pg_try_advisory_xact_lock(hashtextextended('row numbers', %(table_id)s));

-- name: await_commit
-- Waits for the transaction that commits the numbers of a load that had the right before, and has lost it.
select pg_advisory_xact_lock(hashtextextended('row numbers, committing', %(table_id)s));

-- name: begin_commit
-- Has the next load that gets the right wait for the end of this transaction.
select pg_advisory_xact_lock_shared(hashtextextended('row numbers, committing', %(table_id)s));

-- name: is_alone
-- Whether a session has the right to number rows of the table; process ids are given again.
select exists (
    select
    from (select hashtextextended('row numbers', %(table_id)s) as key) as wanted
    join pg_locks as held
        on held.classid::bigint = (wanted.key >> 32) & 4294967295
        and held.objid::bigint = wanted.key & 4294967295
    join pg_stat_activity as holder using (pid)
    where held.locktype = 'advisory' and held.objsubid = 1 and held.granted
        and held.database = (select oid from pg_database where datname = current_database())
        and pid = %(pid)s and holder.backend_start = %(began)s
);
