-- name: create_files
-- Part of creating a table: makes the index that finds the markers of unreferenced files.
create index {unreferenced} on {file_reference} (file_id) where file_unreferenced

-- name: attach_files
-- Part of creating a table: nothing to do, as this layout keeps the files among the references.
select

-- name: drop_files
-- Part of a conversion: deletes what this layout kept of the files.
delete from {file_reference} where partition_id = '';
drop index {unreferenced};

-- name: adopt
-- Part of a conversion: tracks the files of fact.
insert into {file_reference} (
    table_id, partition_id, file_id, filename, row_count, count_approximate, only_contains_data_for_this_partition,
    last_updated, file_byte_count, file_row_count, file_min_key, file_max_key, file_digest,
    file_deletions_till, file_deletions_left, file_added_at, file_unreferenced
)
select %(table_id)s, '', file_id, filename, 0, false, false, coalesce(unreferenced_at, 'infinity'),
    byte_count, row_count, min_key, max_key, digest, deletions_till, deletions_left, added_at,
    unreferenced_at is not null
from fact

-- name: lock
-- Locks a table's own PostgreSQL tables, after waiting for all transactions that use them.
lock table {file_reference}, {file_content} in access exclusive mode;

-- name: drop
-- Drops a table's own partition of the references. Waits for its readers first: dropping locks the parent as
-- well, which other tables need to be made.
{lock}
drop table {file_reference}, {file_content};

-- name: live
-- Part of a query: whether the row r is a reference, and not a marker, whose partition id is empty.
r.partition_id <> ''

-- name: file_facts
-- Part of a query: every tracked file with its facts.
select f.file_id, f.filename, f.file_byte_count as byte_count, f.file_row_count as row_count,
    f.file_min_key as min_key, f.file_max_key as max_key, f.file_digest as digest,
    coalesce(f.file_deletions_till, 0) as deletions_till, f.file_deletions_left as deletions_left, f.file_added_at as added_at,
    nullif(f.last_updated, 'infinity') as unreferenced_at
from {file_reference} f
where f.partition_id = ''

-- name: track
-- Part of an update: tracks the files of new_file.
insert into {file_reference} as f (
    table_id, partition_id, file_id, filename, row_count, count_approximate, only_contains_data_for_this_partition,
    last_updated, file_byte_count, file_row_count, file_min_key, file_max_key, file_digest,
    file_deletions_till, file_added_at, file_unreferenced
)
select %(table_id)s, '', file_id, filename, 0, false, false,
    case when referenced then 'infinity' else clock_timestamp() end,
    byte_count, row_count, min_key, max_key, digest, deletions_till, clock_timestamp(), not referenced
from new_file
order by file_id

-- name: is_tracked
-- Part of a query: whether the file o.file_id is tracked.
select from {file_reference} f where f.partition_id = '' and f.file_id = o.file_id offset 0

-- name: lock_file
-- Part of an update: locks the file i.file_id, if it is tracked.
select f.ctid as place from {file_reference} f where f.partition_id = '' and f.file_id = i.file_id for update

-- name: note_digests
-- Records the digests of files that were written without one.
update {file_reference} f set file_digest = n.digest
from unnest(%(file_ids)s::uuid[], %(digests)s::uuid[]) as n (file_id, digest)
where f.file_id = n.file_id and f.partition_id = '' and f.file_digest is null;

-- name: note_deletions
-- Records for files that were looked at up to which deletion, and which of these deletions still have rows in them.
update {file_reference} f set file_deletions_till = n.till, file_deletions_left = n.left_of::bigint[]
from unnest(%(file_ids)s::uuid[], %(till)s::bigint[], %(left)s::text[]) as n (file_id, till, left_of)
where f.file_id = n.file_id and f.partition_id = '' and coalesce(f.file_deletions_till, 0) < n.till;

-- name: forget_files
-- Part of an update: deletes the records of the files in gone.
delete from {file_reference} f where f.ctid = any(array(select place from gone)) returning f.file_id

-- name: forget_all
-- Part of a query: deletes the records of all files.
delete from {file_reference} where partition_id = ''

-- name: mark_referenced
-- Part of a restore: removes the stamps of files that are referenced again.
update {file_reference} f set last_updated = 'infinity', file_unreferenced = false
where f.partition_id = '' and f.file_id = any(%(ref_file_ids)s::uuid[]) and f.file_unreferenced

-- name: counts_added
-- Part of an update: counts added references; this layout has no counts.
counted as (select 1 where false)

-- name: counts_changed
-- Part of an update: counts removed and added references; this layout has no counts.
counted as (select 1 where false)

-- name: stamp_unreferenced
-- Garbage collection, stage one: stamps the markers of files that lost their last reference since the last run. The stamp is
-- the current time, not that of the removal, which may have been committed later: every plan after the stamp sees the
-- removal.
with {alone}, {gone}, free as materialized (
    -- "offset 0" makes PostgreSQL use the indexes, where joins would read whole tables
    select l.place
    from gone g
    cross join lateral (
        select f.ctid as place
        from {file_reference} f
        where f.partition_id = '' and f.file_id = g.file_id and f.last_updated = 'infinity'
        offset 0
    ) l
    where not exists (
        select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(g.file_id) and r.file_id = g.file_id and r.partition_id <> '' offset 0
    )
), stamped as (
    update {file_reference} f
    set last_updated = {stamp}, file_unreferenced = true
    where f.ctid = any(array(select place from free)) and f.last_updated = 'infinity'
    returning f.file_id
), remembered as (
    update tables set collected_till = pg_current_snapshot() where table_id = %(table_id)s
)
select count(*) from stamped;

-- name: orphaned
-- The number of unreferenced files that stage one has stamped, and their bytes.
select count(*), coalesce(sum(file_byte_count), 0) from {file_reference} where file_unreferenced;

-- name: count_unreferenced
-- Part of a query: the number of unreferenced files, stamped or not yet.
select count(*)
from (
    select f.file_id from {file_reference} f where f.file_unreferenced
    union
    {gone_since}
        and exists (select from {file_reference} f where f.partition_id = '' and f.file_id = r.file_id offset 0)
) u
where not exists (
    select from {file_reference} r
    where uuid_hash(r.file_id) = uuid_hash(u.file_id) and r.file_id = u.file_id and r.partition_id <> ''
    offset 0
)

-- name: ready_for_gc
-- A page of the files whose markers were stamped before a time, sorted by id.
select f.file_id, f.filename
from {file_reference} f
where f.file_unreferenced and f.last_updated < %(before)s and f.file_id > %(after)s
    and not exists (select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id and r.partition_id <> '' offset 0)
order by f.file_id
limit %(limit)s;
