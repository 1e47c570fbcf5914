-- name: aggregates
-- Whether rows of equal key are merged, and the version of the schema; locks both until the transaction ends.
select properties ->> 'aggregate' is not null, schema_version from tables where table_id = %(table_id)s for share;

-- name: recorded
-- Part of an update: records a deletion, and the rows that it lists, while writers are kept out.
recorded as (
    insert into deletion (table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, epoch)
    select t.table_id, 1 + coalesce((select max(deletion_id) from deletion where table_id = %(table_id)s), 0),
        %(condition)s, %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(min_key)s, %(max_key)s, %(by_values)s, t.epoch
    from tables t
    where t.table_id = %(table_id)s
    returning deletion_id, deleted_at
), listed as (
    insert into deletion_content (table_id, content_id, deletion_id, content)
    select %(table_id)s, %(content_id)s::uuid, deletion_id, %(content)s::bytea
    from recorded
    where %(content_id)s::uuid is not null
)

-- name: record
-- Records a deletion; returns its number and time.
with {recorded}
select deletion_id, deleted_at from recorded;

-- name: record_whole
-- Records a deletion; raises not_whole if the table was dropped, has other columns, or merges rows that it would match by values.
with known as materialized (
    select schema_version = %(version)s and not (%(by_values)s and properties ->> 'aggregate' is not null) as fits
    from tables
    where table_id = %(table_id)s
    for share
), {recorded}
select case when (select bool_and(fits) from known) is not true or (select count(*) from recorded) = 0 then not_whole() end;

-- name: list
-- A table's deletions, pending ones or all, sorted by number.
select deletion_id, condition, by_values, deleted_at, retired_xid is null
from deletion
where table_id = %(table_id)s and (retired_xid is null or %(all)s)
order by deletion_id;

-- name: count_pending
-- The number of pending deletions, which readers apply.
select count(*) from deletion where table_id = %(table_id)s and retired_xid is null;

-- name: pending_then
-- Part of a restore: the deletions that were pending in a snapshot.
pending_then as materialized (
    select *
    from deletion d
    where d.table_id = %(table_id)s and pg_visible_in_snapshot(d.added_xid, %(snapshot)s::pg_snapshot)
        and pg_visible_in_snapshot(d.retired_xid, %(snapshot)s::pg_snapshot) is not true
)

-- name: then_pending
-- The conditions of the deletions that were pending in a snapshot.
with {pending_then}
select deletion_id, condition from pending_then order by deletion_id;

-- name: count_restored
-- The number of deletions that a restore to a snapshot undoes or makes pending again.
with {pending_then}
select count(*)
from (select deletion_id from deletion d where d.table_id = %(table_id)s and d.retired_xid is null) n
full join pending_then t using (deletion_id)
where n.deletion_id is null or t.deletion_id is null;

-- name: restore
-- Part of a restore: undoes the deletions that were not pending in a snapshot, and makes pending again those that were.
with {pending_then}, undone as (
    update deletion d
    set retired_xid = pg_current_xact_id(), retired_at = clock_timestamp()
    where d.table_id = %(table_id)s and d.retired_xid is null
        and d.deletion_id not in (select deletion_id from pending_then)
)
insert into deletion (
    table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, deleted_at, epoch, snapshot
)
select table_id, deletion_id, condition, min_keys, max_keys, min_key, max_key, by_values, deleted_at, epoch, snapshot
from pending_then t
where not exists (
    select from deletion d
    where d.table_id = %(table_id)s and d.deletion_id = t.deletion_id and d.retired_xid is null
);

-- name: begin
-- Begins the erasure of a deletion. It takes over unfinished erasures with the same condition that were not undone, with the
-- files that they found, and ends them. Returns their numbers.
with older as (
    update erasure e
    set finished_at = clock_timestamp()
    from deletion d
    where e.table_id = %(table_id)s and e.finished_at is null and e.deletion_id <> %(deletion_id)s
        and d.table_id = e.table_id and d.deletion_id = e.deletion_id and d.condition = %(condition)s
        and (d.retired_xid in (select restored_xid from restored r where r.table_id = e.table_id)) is not true
    returning e.deletion_id, e.files_looked_at
), taken as (
    update erased_file f set deletion_id = %(deletion_id)s
    from older o
    where f.table_id = %(table_id)s and f.deletion_id = o.deletion_id
), begun as (
    insert into erasure (table_id, deletion_id, files_looked_at)
    select %(table_id)s, %(deletion_id)s, coalesce(sum(files_looked_at), 0) from older
)
select deletion_id from older;

-- name: is_undone
-- Whether a restore has undone the deletion of an erasure.
select exists (
    select from deletion d
    join restored r on r.table_id = d.table_id and r.restored_xid = d.retired_xid
    where d.table_id = %(table_id)s and d.deletion_id = %(deletion_id)s
);

-- name: candidates
-- A page of the files, referenced or not, that may have rows of an erasure, judged by their keys and earlier looks; each with
-- whether it was found to have some.
select f.file_id, f.filename, f.byte_count, e.file_id is not null
from ({file_facts}) f
cross join lateral (
    select * from deletion where table_id = %(table_id)s and deletion_id = %(deletion_id)s limit 1 offset 0
) d
left join erased_file e on e.table_id = %(table_id)s and e.file_id = f.file_id
where f.file_id > %(after)s and {may_be_of}
order by f.file_id
limit %(limit)s;

-- name: looked
-- Records how many files were read, and those that have rows.
with looked as (
    update erasure
    set files_looked_at = files_looked_at + %(looked)s
    where table_id = %(table_id)s and deletion_id = %(deletion_id)s
)
insert into erased_file (table_id, file_id, deletion_id, filename, row_count, freed_at)
select %(table_id)s, file_id, %(deletion_id)s, filename, row_count, case when %(is_freed)s then clock_timestamp() end
from unnest(%(file_ids)s::uuid[], %(filenames)s::text[], %(row_counts)s::bigint[]) as f (file_id, filename, row_count)
on conflict do nothing;

-- name: referenced
-- The number of references to files that have rows, and how many of them no job holds.
select count(*), count(*) filter (where r.job_id is null)
from erased_file e
cross join lateral (
    select r.job_id
    from {file_reference} r
    where uuid_hash(r.file_id) = uuid_hash(e.file_id) and r.file_id = e.file_id and {live}
    offset 0
) r
where e.table_id = %(table_id)s and e.freed_at is null;

-- name: held_by_others
-- The jobs that hold files with rows and are not the erasure's, or whose deadline is over; each with whether a process runs
-- it.
select distinct r.job_id, r.partition_id, coalesce(j.leased_until > clock_timestamp(), false)
from erased_file e
cross join lateral (
    select r.job_id, r.partition_id
    from {file_reference} r
    where uuid_hash(r.file_id) = uuid_hash(e.file_id) and r.file_id = e.file_id and {live} and r.job_id is not null
    offset 0
) r
left join compaction_job j
    on j.table_id = %(table_id)s and j.job_id = r.job_id and j.partition_id = r.partition_id
where e.table_id = %(table_id)s and e.freed_at is null
    and (j.run_id is distinct from %(run_id)s::uuid or j.run_until < clock_timestamp());

-- name: to_free
-- Unreferenced files that had rows.
select e.filename
from erased_file e
where e.table_id = %(table_id)s and e.freed_at is null and not exists (
        select from {file_reference} r
        where uuid_hash(r.file_id) = uuid_hash(e.file_id) and r.file_id = e.file_id and {live}
        offset 0
    )
order by e.file_id
limit %(limit)s;

-- name: freed
-- Records files whose objects were deleted.
update erased_file set freed_at = clock_timestamp()
where table_id = %(table_id)s and filename = any(%(filenames)s) and freed_at is null;

-- name: consumers_behind
-- The consumers that have not read a deletion yet, and hold files.
select c.name
from consumer c
join hold h on h.holder = concat('consumer ', c.table_id, '/', c.name) and h.until > clock_timestamp()
where c.table_id = %(table_id)s and c.snapshot is not null and exists (
        select from deletion d
        where d.table_id = c.table_id and d.deletion_id = %(deletion_id)s
            and not pg_visible_in_snapshot(d.added_xid, c.snapshot)
    )
order by c.name;

-- name: writers
-- The open attempts that began before a deletion, or have their place before it, with the prefixes of their objects. A load
-- that began before the deletion was committed did not see it.
select replace(attempt_id::text, '-', ''), object_prefix
from write_attempt
where table_id = %(table_id)s and abandoned_at is null and finished_at is null
    and (
        deletions_till < %(deletion_id)s
        or started_at < (
            select min(deleted_at) from deletion where table_id = %(table_id)s and deletion_id = %(deletion_id)s
        )
    )
order by started_at;

-- name: counts
-- The number of files that an erasure read, of those that had rows, and of the rows.
select e.files_looked_at, count(f.file_id), coalesce(sum(f.row_count), 0)::bigint
from erasure e
left join erased_file f on f.table_id = e.table_id and f.deletion_id = e.deletion_id
where e.table_id = %(table_id)s and e.deletion_id = %(deletion_id)s
group by e.files_looked_at;

-- name: filenames
-- The files that had rows of an erasure.
select filename from erased_file where table_id = %(table_id)s and deletion_id = %(deletion_id)s order by filename;

-- name: finish
-- Stores the proof of an erasure, and ends it if it is finished.
update erasure
set report = %(report)s, finished_at = case when %(is_finished)s then coalesce(finished_at, clock_timestamp()) end
where table_id = %(table_id)s and deletion_id = %(deletion_id)s;

-- name: proofs
-- The proofs of a table's erasures, the oldest first.
select report from erasure where table_id = %(table_id)s and report is not null order by deletion_id;

-- name: erased
-- The last erasure that erased some files, given by names or ids; without files, the last one active after a time.
select e.deletion_id, e.began_at, coalesce(e.finished_at, clock_timestamp())
from erasure e
where e.table_id = %(table_id)s and case
    when %(files)s::text[] is null then coalesce(e.finished_at, clock_timestamp()) >= %(at)s
    else exists (
        select from erased_file f
        where f.table_id = e.table_id and f.deletion_id = e.deletion_id
            and (f.filename = any(%(files)s) or f.file_id::text = any(%(files)s))
    )
end
order by e.deletion_id desc
limit 1;

-- name: backups_taken
-- The places in which backups of the instance were begun, and the names of the backups.
select place, array_agg(name order by name) from backup_taken group by place order by place;
