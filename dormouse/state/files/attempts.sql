-- name: begin
-- Announces a writer before it writes anything. Its objects lie under the incarnation. A load that will take its place
-- later is visible from now on. Without "durable", a crash of the server may lose the record: see confirm.
insert into write_attempt (table_id, attempt_id, object_prefix, sequence, deletions_till, schema_version)
select
    table_id,
    %(attempt_id)s::uuid,
    concat(
        %(prefix)s::text, (select coalesce(max(number), 0) from incarnation where confirmed), '/',
        replace(%(attempt_id)s::uuid::text, '-', ''), '/'
    ),
    %(no_place)s::bigint,
    %(no_place)s::bigint,
    schema_version
from tables
where table_id = %(table_id)s and (%(durable)s or set_config('synchronous_commit', 'off', true) = 'off')
-- waits for a drop or a change of the columns, or makes these wait, so that they see this writer
for key share
returning object_prefix, schema_version;

-- name: take_place
-- Gives an announced load its place among the loads and deletions. A transaction that looked for open loads earlier, and did
-- not see this one, knows no larger sequence.
update write_attempt a
set sequence = nextval('load_sequence'),
    deletions_till = (select coalesce(max(d.deletion_id), 0) from deletion d where d.table_id = %(table_id)s)
where a.table_id = %(table_id)s and a.attempt_id = %(attempt_id)s::uuid
    and (%(durable)s or set_config('synchronous_commit', 'off', true) = 'off')
returning a.sequence, a.deletions_till, clock_timestamp();

-- name: plan
-- Gives a writer that may write no object its place, without a record, and the present position of the table.
select
    concat(
        %(prefix)s::text, (select coalesce(max(number), 0) from incarnation where confirmed), '/',
        replace(%(attempt_id)s::uuid::text, '-', ''), '/'
    ),
    schema_version, case when %(has_place)s then nextval('load_sequence') end,
    (select coalesce(max(d.deletion_id), 0) from deletion d where d.table_id = %(table_id)s),
    clock_timestamp(), epoch, pg_current_snapshot()::text
from tables
where table_id = %(table_id)s and (%(name)s::text is null or name = %(name)s);

-- name: older
-- Whether a load is open that began before a place was taken.
select exists (
    select from write_attempt
    where table_id = %(table_id)s and sequence < %(sequence)s and sequence > 0
        and abandoned_at is null and finished_at is null
);

-- name: announce
-- Announces a planned writer before it writes its first object. Not if rows were deleted since it was planned, as an erasure
-- may have looked for writers.
insert into write_attempt (table_id, attempt_id, object_prefix, sequence, deletions_till, schema_version)
select table_id, %(attempt_id)s::uuid, %(prefix)s, %(sequence)s::bigint, %(deletions_till)s::bigint, %(version)s
from tables
where table_id = %(table_id)s and %(last_deletion)s = (
        select coalesce(max(d.deletion_id), 0) from deletion d where d.table_id = %(table_id)s
    )
for key share
returning attempt_id;

-- name: confirm
-- Puts the record of an attempt on the disk: this transaction does, and with it all earlier ones.
update write_attempt set started_at = started_at
where table_id = %(table_id)s and attempt_id = %(attempt_id)s::uuid and abandoned_at is null
returning attempt_id;

-- name: finish
-- Ends attempts in the transaction that commits their files; returns those that were not abandoned.
delete from write_attempt
where table_id = %(table_id)s and attempt_id = any(%(attempt_ids)s::uuid[])
    and abandoned_at is null and finished_at is null
returning attempt_id;

-- name: finish_for_now
-- Ends attempts as finish does, with or without a commit, but keeps their rows: other processes may still write objects
-- that no commit refers to.
update write_attempt set finished_at = clock_timestamp()
where table_id = %(table_id)s and attempt_id = any(%(attempt_ids)s::uuid[])
    and abandoned_at is null and finished_at is null
returning attempt_id;

-- name: remember
-- Records an unknown attempt of an existing table as ended, like finish_for_now without a commit. Not after an adoption if
-- its objects lie under an earlier incarnation, as they may belong to another timeline.
insert into write_attempt (table_id, attempt_id, object_prefix, finished_at)
select table_id, %(attempt_id)s::uuid, %(prefix)s::text, clock_timestamp()
from tables
where table_id = %(table_id)s
    and split_part(%(prefix)s::text, '/', -3)::bigint >= (
        select coalesce(max(number), 0) from incarnation where reason = 'adoption'
    )
on conflict do nothing
returning attempt_id;

-- name: finished
-- A table's attempts that ended so long ago that no task can still write their objects.
select table_id, attempt_id, object_prefix
from write_attempt
where table_id = %(table_id)s and finished_at < clock_timestamp() - make_interval(secs => %(expiry_seconds)s)
order by finished_at;

-- name: abandon
-- Abandons an attempt: it can commit nothing, and its objects will be deleted. Returns nothing if it has committed.
update write_attempt set abandoned_at = coalesce(abandoned_at, clock_timestamp())
where table_id = %(table_id)s and attempt_id = %(attempt_id)s and finished_at is null
returning attempt_id;

-- name: abandon_all
-- Abandons all attempts and ends the leases of all jobs, as every writer is known to be dead.
with jobs as (update compaction_job set leased_until = '-infinity')
update write_attempt set abandoned_at = clock_timestamp()
where abandoned_at is null and finished_at is null;

-- name: abandon_expired
-- Abandons a table's attempts that are too old.
update write_attempt set abandoned_at = clock_timestamp()
where table_id = %(table_id)s and abandoned_at is null and finished_at is null
    and started_at < clock_timestamp() - make_interval(secs => %(expiry_seconds)s);

-- name: abandon_table
-- Part of dropping a table: schedules all its objects for deletion, and abandons its attempts. Its writers notice that, and
-- delete what they wrote.
with finished as (
    delete from write_attempt where table_id = %(table_id)s and finished_at is not null
), writers as (
    update write_attempt set abandoned_at = clock_timestamp()
    where table_id = %(table_id)s and abandoned_at is null and finished_at is null
)
insert into write_attempt (table_id, attempt_id, object_prefix, abandoned_at)
select %(table_id)s, gen_random_uuid(), prefix, clock_timestamp()
from (
    select prefix
    from unnest(%(object_prefixes)s::text[]) as prefix
    where not exists (select from incarnation where reason = 'adoption')
    union all
    -- after an adoption, objects under earlier incarnations may belong to another timeline
    select concat((%(object_prefixes)s::text[])[1], number, '/')
    from (
        select max(number) filter (where reason = 'adoption') as adopted, max(number) as latest from incarnation
    ) i, generate_series(i.adopted, i.latest) number
) prefixes;

-- name: abandoned
-- The attempts whose objects must be deleted: those of a table, and of dropped tables.
select table_id, attempt_id, object_prefix
from write_attempt a
where abandoned_at is not null
    and case when exists (select from tables t where t.table_id = a.table_id)
        then table_id = %(table_id)s
        -- a holder may still read the dropped table. The hold of an adoption covers all of history, but only objects under
        -- earlier incarnations; holds of this table alone were deleted with it
        else not exists (select from hold where table_id is null and until > clock_timestamp() and since > 'epoch')
    end
order by abandoned_at;

-- name: forget
-- Deletes the row of an attempt whose objects were deleted.
delete from write_attempt where table_id = %(table_id)s and attempt_id = %(attempt_id)s;

-- name: forget_collected
-- Deletes the row as forget does, but keeps that of a dropped table for a while: a writer may outlive the table, and die.
delete from write_attempt a
where table_id = %(table_id)s and attempt_id = %(attempt_id)s
    and (
        exists (select from tables t where t.table_id = a.table_id)
        or abandoned_at < clock_timestamp() - make_interval(secs => %(expiry_seconds)s)
    )
returning attempt_id;

-- name: of_attempts
-- Those of some objects that belong to an attempt. Since the prefixes have few lengths, each name is cut to each length and
-- joined, rather than compared with each attempt.
with attempt as materialized (
    select object_prefix, length(object_prefix) as chars from write_attempt
)
select n.name
from unnest(%(names)s::text[]) as n (name)
cross join (select distinct chars from attempt) l
join attempt a on a.object_prefix = left(n.name, l.chars);

-- name: number_alone
-- Takes the right to number rows of the table, unless another load has it; the lock ends with the transaction.
select pg_try_advisory_xact_lock(hashtextextended('row numbers', %(table_id)s));

-- name: await_commit
-- Waits for a transaction that commits the numbers of an earlier load, which had the right and may have lost it.
select pg_advisory_xact_lock(hashtextextended('row numbers, committing', %(table_id)s));

-- name: begin_commit
-- Makes the next load that gets the right wait for the end of this transaction.
select pg_advisory_xact_lock_shared(hashtextextended('row numbers, committing', %(table_id)s));

-- name: is_alone
-- Whether a session has the right to number rows of the table. Compares its start, too, as process ids are reused.
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
