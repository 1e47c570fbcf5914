-- name: create_files
-- Part of creating a table: creates its own table of the counts.
create table {file_count} (like file_count including all)
with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05)

-- name: attach_files
-- Part of creating a table: attaches its table to the parent, which other creations wait for until the transaction ends.
alter table file_count attach partition {file_count} for values in ({table_id})

-- name: drop_files
-- Part of a conversion: deletes what this layout kept of the files.
drop table {file_count};

-- name: adopt
-- Part of a conversion: tracks the files of fact, and counts their references.
insert into {file_count} (
    table_id, file_id, salt, count, changed_at, filename, byte_count, row_count, min_key, max_key, digest,
    deletions_till, deletions_left
)
-- a file that came without references was added a microsecond after it was stamped
select %(table_id)s, file_id, -1, case when unreferenced_at is not null then 0 end, least(added_at, unreferenced_at),
    filename, byte_count, row_count, min_key, max_key, digest, deletions_till, deletions_left
from fact
union all
select %(table_id)s, file_id, 0, 0, coalesce(unreferenced_at, clock_timestamp()), null, null, null, null, null, null, null, null
from fact
where not exists (
    select from {file_reference} r
    where uuid_hash(r.file_id) = uuid_hash(fact.file_id) and r.file_id = fact.file_id and r.partition_id <> ''
)
union all
select %(table_id)s, file_id, (hashtextextended(partition_id, 0) & 9223372036854775807) % %(salt_buckets)s::bigint as salt,
    count(*), clock_timestamp(), null, null, null, null, null, null, null, null
from {file_reference}
where partition_id <> ''
group by file_id, salt

-- name: lock
-- Locks a table's own PostgreSQL tables, after waiting for all transactions that use them.
lock table {file_reference}, {file_count}, {file_content} in access exclusive mode;

-- name: drop
-- Drops a table's own partitions of the references and the counts. Waits for their readers first: dropping
-- locks the parents as well, which other tables need to be made.
{lock}
drop table {file_reference}, {file_count}, {file_content};

-- name: live
-- Part of a query: whether the row r is a reference, and not a marker; this layout has no markers.
true

-- name: file_facts
-- Part of a query: every tracked file with its facts.
select f.file_id, f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.digest,
    coalesce(f.deletions_till, 0) as deletions_till, f.deletions_left, f.changed_at as added_at,
    case when f.is_zero then (select max(c.changed_at) from {file_count} c where c.file_id = f.file_id) end as unreferenced_at
from {file_count} f
where f.salt = -1

-- name: track
-- Part of an update: tracks the files of new_file.
insert into {file_count} as f (
    table_id, file_id, salt, count, filename, byte_count, row_count, min_key, max_key, digest, deletions_till
)
select %(table_id)s, file_id, -1, case when not referenced then 0 end, filename, byte_count, row_count,
    min_key, max_key, digest, deletions_till
from new_file
order by file_id

-- name: is_tracked
-- Part of a query: whether the file o.file_id is tracked.
select from {file_count} f where f.file_id = o.file_id and f.salt = -1 offset 0

-- name: lock_file
-- Part of an update: locks the file i.file_id, if it is tracked.
select f.ctid as place from {file_count} f where f.file_id = i.file_id and f.salt = -1 for update

-- name: note_digests
-- Records the digests of files that were written without one.
update {file_count} f set digest = n.digest
from unnest(%(file_ids)s::uuid[], %(digests)s::uuid[]) as n (file_id, digest)
where f.file_id = n.file_id and f.salt = -1 and f.digest is null;

-- name: note_deletions
-- Records for files that were looked at up to which deletion, and which of these deletions still have rows in them.
update {file_count} f set deletions_till = n.till, deletions_left = n.left_of::bigint[]
from unnest(%(file_ids)s::uuid[], %(till)s::bigint[], %(left)s::text[]) as n (file_id, till, left_of)
where f.file_id = n.file_id and f.salt = -1 and coalesce(f.deletions_till, 0) < n.till;

-- name: forget_files
-- Part of an update: deletes the records of the files in gone.
delete from {file_count} f where f.file_id = any(array(select file_id from gone)) returning f.file_id

-- name: forget_all
-- Part of a query: deletes the records of all files.
delete from {file_count}

-- name: mark_referenced
-- Part of a restore: removes the stamps of files that are referenced again.
update {file_count} f set count = null
where f.salt = -1 and f.file_id = any(%(ref_file_ids)s::uuid[]) and f.count = 0

-- name: counts_added
-- Part of an update: counts the added references; updates the counts in one order, so that none deadlock.
counted as (
    insert into {file_count} as f (table_id, file_id, salt, count)
    select %(table_id)s, file_id,
        (hashtextextended(partition_id, 0) & 9223372036854775807) % %(salt_buckets)s::bigint as salt, count(*)
    from added
    group by file_id, salt
    order by file_id, salt
    on conflict (file_id, salt, table_id) do update
    set count = f.count + excluded.count, changed_at = clock_timestamp()
)

-- name: counts_changed
-- Part of an update: counts the removed and added references; updates the counts in one order.
counted as (
    insert into {file_count} as f (table_id, file_id, salt, count)
    select %(table_id)s, file_id, salt, sum(change)
    from (
        select file_id, change,
            (hashtextextended(partition_id, 0) & 9223372036854775807) % %(salt_buckets)s::bigint as salt
        from (
            select partition_id, file_id, -1 as change from removed
            union all
            select partition_id, file_id, 1 from added
        ) changed
    ) salted
    group by file_id, salt
    having sum(change) <> 0
    order by file_id, salt
    on conflict (file_id, salt, table_id) do update
    set count = f.count + excluded.count, changed_at = clock_timestamp()
)

-- name: stamp_unreferenced
-- Garbage collection, stage one: files whose counts add up to 0 get the count 0, and their salted counts get the current
-- time. That is not the time of the removal, which may have been committed later: every plan after it sees the removal.
with {alone}, free as materialized (
    select s.places
    from state
    cross join lateral (select distinct file_id from {file_count} where is_zero offset 0) z
    cross join lateral (
        select array_agg(f.ctid) as places, sum(count) as count, bool_or(salt = -1 and count is null) as is_new
        from {file_count} f
        where f.file_id = z.file_id
        offset 0
    ) s
    where s.count = 0 and s.is_new and not exists (
        select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(z.file_id) and r.file_id = z.file_id offset 0
    )
), stamped as (
    update {file_count} f
    set count = 0, changed_at = case when salt = -1 then changed_at else {stamp} end
    where f.ctid = any(array(select unnest(places) from free)) and (salt >= 0 or count is null)
    returning salt
), remembered as (
    -- this layout does not need the log of removals to find the files
    update tables set collected_till = pg_current_snapshot() where table_id = %(table_id)s
)
select count(*) from stamped where salt = -1;

-- name: orphaned
-- The number of unreferenced files, and their bytes.
select count(*), coalesce(sum(s.byte_count), 0)
from (select distinct file_id from {file_count} where is_zero) z
cross join lateral (
    select sum(count) as count, max(byte_count) as byte_count from {file_count} f where f.file_id = z.file_id
) s
where s.count = 0;

-- name: count_unreferenced
-- Part of a query: the number of unreferenced files: their counts add up to 0.
select count(*)
from (select distinct file_id from {file_count} where is_zero) z
cross join lateral (select sum(count) as count from {file_count} f where f.file_id = z.file_id) s
where s.count = 0

-- name: ready_for_gc
-- A page of the files that were stamped before a time, sorted by id.
select f.file_id, f.filename
from {file_count} f
cross join lateral (
    -- one snapshot is enough: a file that has no reference never gets one again
    select sum(count) as count, max(changed_at) as changed_at from {file_count} c where c.file_id = f.file_id offset 0
) s
where f.is_zero and f.salt = -1 and f.file_id > %(after)s and s.count = 0 and s.changed_at < %(before)s
    and not exists (select from {file_reference} r where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id offset 0)
order by f.file_id
limit %(limit)s;

-- name: check_counts
-- Files whose counts do not add up to their references.
select null::text as partition_id, coalesce(c.filename, r.filename) as filename,
    format('%s references are counted, %s are there', coalesce(c.count, 0), coalesce(r.count, 0)) as detail
from (select file_id, max(filename) as filename, sum(count) as count from {file_count} group by file_id) c
full join (select file_id, min(filename) as filename, count(*) from {file_reference} group by file_id) r using (file_id)
where coalesce(c.count, 0) <> coalesce(r.count, 0)
limit %(limit)s;

-- name: uncount
-- Deletes the counts of files that do not add up to their references; returns the files. Runs while writers are kept out.
delete from {file_count} f
where salt >= 0 and file_id in (
    select file_id
    from (select file_id, sum(count) as count from {file_count} group by file_id) c
    full join (select file_id, count(*) from {file_reference} group by file_id) r using (file_id)
    where coalesce(c.count, 0) <> coalesce(r.count, 0)
)
returning file_id;

-- name: recount
-- Counts the references of some files again.
insert into {file_count} (table_id, file_id, salt, count)
select %(table_id)s, f.file_id, coalesce(
        (hashtextextended(r.partition_id, 0) & 9223372036854775807) % %(salt_buckets)s::bigint, 0
    ) as salt, count(r.file_id)
from (select distinct unnest(%(file_ids)s::uuid[]) as file_id) f
left join {file_reference} r on r.file_id = f.file_id
group by f.file_id, salt;
