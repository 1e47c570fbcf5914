-- name: create_files
-- Part of creating a table: creates its own table of the files.
create table {file} (like file including all) with (fillfactor = 90)

-- name: attach_files
-- Part of creating a table: attaches its table to the parent, which other creations wait for until the transaction ends.
alter table file attach partition {file} for values in ({table_id})

-- name: drop_files
-- Part of a conversion: deletes what this layout kept of the files.
drop table {file};

-- name: adopt
-- Part of a conversion: tracks the files of fact.
insert into {file} (
    table_id, file_id, filename, byte_count, row_count, min_key, max_key, digest, deletions_till, deletions_left,
    added_at, unreferenced_at
)
select %(table_id)s, file_id, filename, byte_count, row_count, min_key, max_key, digest, deletions_till, deletions_left, added_at,
    coalesce(unreferenced_at, 'infinity')
from fact

-- name: lock
-- Locks a table's own PostgreSQL tables, after waiting for all transactions that use them.
lock table {file_reference}, {file}, {file_content} in access exclusive mode;

-- name: drop
-- Drops a table's own partitions of the references and the files. Waits for their readers first: dropping
-- locks the parents as well, which other tables need to be made.
{lock}
drop table {file_reference}, {file}, {file_content};

-- name: file_facts
-- Part of a query: every tracked file with its facts.
select f.file_id, f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.digest, f.deletions_till,
    f.deletions_left, f.added_at, nullif(f.unreferenced_at, 'infinity') as unreferenced_at
from {file} f

-- name: track
-- Part of an update: tracks the files of new_file.
insert into {file} as f (
    table_id, file_id, filename, byte_count, row_count, min_key, max_key, digest, deletions_till, unreferenced_at
)
select %(table_id)s, file_id, filename, byte_count, row_count, min_key, max_key, digest, deletions_till,
    case when referenced then 'infinity' else clock_timestamp() end
from new_file
order by file_id

-- name: is_tracked
-- Part of a query: whether the file o.file_id is tracked.
select from {file} f where f.file_id = o.file_id offset 0

-- name: live
-- Part of a query: whether the row r is a reference, and not a marker; this layout has no markers.
true

-- name: lock_file
-- Part of an update: locks the file i.file_id, if it is tracked.
select f.ctid as place from {file} f where f.file_id = i.file_id for update

-- name: note_digests
-- Records the digests of files that were written without one.
update {file} f set digest = n.digest
from unnest(%(file_ids)s::uuid[], %(digests)s::uuid[]) as n (file_id, digest)
where f.file_id = n.file_id and f.digest is null;

-- name: note_deletions
-- Records for files that were looked at up to which deletion, and which of these deletions still have rows in them.
update {file} f set deletions_till = n.till, deletions_left = n.left_of::bigint[]
from unnest(%(file_ids)s::uuid[], %(till)s::bigint[], %(left)s::text[]) as n (file_id, till, left_of)
where f.file_id = n.file_id and f.deletions_till < n.till;

-- name: forget_files
-- Part of an update: deletes the records of the files in gone.
delete from {file} f where f.ctid = any(array(select place from gone)) returning f.file_id

-- name: mark_referenced
-- Part of a restore: removes the stamps of files that are referenced again.
update {file} f set unreferenced_at = 'infinity'
where f.file_id = any(%(ref_file_ids)s::uuid[]) and f.unreferenced_at < 'infinity'

-- name: counts_added
-- Part of an update: counts added references; this layout has no counts.
counted as (select 1 where false)

-- name: counts_changed
-- Part of an update: counts removed and added references; this layout has no counts.
counted as (select 1 where false)

-- name: forget_all
-- Part of a query: deletes the records of all files.
delete from {file}

-- name: stamp_unreferenced
-- Garbage collection, stage one: stamps files that lost their last reference since the last run. The stamp is the current
-- time, not that of the removal, which may have been committed later: every plan after the stamp sees the removal.
with {alone}, {gone}, free as materialized (
    -- "offset 0" makes PostgreSQL use the indexes, where joins would read whole tables
    select l.place
    from gone g
    cross join lateral (
        select f.ctid as place from {file} f where f.file_id = g.file_id and f.unreferenced_at = 'infinity' offset 0
    ) l
    where not exists (
        select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(g.file_id) and r.file_id = g.file_id offset 0
    )
), stamped as (
    update {file} f
    set unreferenced_at = {stamp}
    where f.ctid = any(array(select place from free)) and f.unreferenced_at = 'infinity'
    returning f.file_id
), remembered as (
    update tables set collected_till = pg_current_snapshot() where table_id = %(table_id)s
)
select count(*) from stamped;

-- name: orphaned
-- The number of unreferenced files that stage one has stamped, and their bytes.
select count(*), coalesce(sum(byte_count), 0) from {file} where unreferenced_at < 'infinity';

-- name: count_unreferenced
-- Part of a query: the number of unreferenced files, stamped or not yet.
select count(*)
from (
    select f.file_id from {file} f where f.unreferenced_at < 'infinity'
    union
    {gone_since} and exists (select from {file} f where f.file_id = r.file_id offset 0)
) u
where not exists (
    select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(u.file_id) and r.file_id = u.file_id offset 0
)

-- name: ready_for_gc
-- A page of the files that were stamped before a time, sorted by id.
select f.file_id, f.filename
from {file} f
where f.unreferenced_at < %(before)s and f.unreferenced_at < 'infinity' and f.file_id > %(after)s
    and not exists (select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id offset 0)
order by f.file_id
limit %(limit)s;
