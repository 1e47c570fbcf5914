-- name: create
-- Makes a table's own partitions of the references and the files.
create table {file_reference} (like file_reference including all);
create table {file} (like file including all);
alter table {file_reference} set (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05);
alter table {file} set (fillfactor = 90);
alter table file_reference attach partition {file_reference} for values in ({table_id});
alter table file attach partition {file} for values in ({table_id});

-- name: drop
-- Drops a table's own partitions of the references and the files. Waits for their readers first: dropping
-- locks the parents as well, which other tables need to be made.
lock table {file_reference}, {file} in access exclusive mode;
drop table {file_reference}, {file};

-- name: track
-- Part of an update: tracks the files of new_file that are not tracked yet.
insert into {file} as f (
    table_id, file_id, filename, byte_count, row_count, min_key, max_key, unreferenced_at
)
select %(table_id)s, file_id, filename, byte_count, row_count, min_key, max_key,
    case when referenced then 'infinity' else clock_timestamp() end
from new_file
order by file_id
on conflict do nothing
returning f.file_id

-- name: is_tracked
-- Part of a query: whether the file o.file_id is tracked.
select from {file} f where f.file_id = o.file_id

-- name: forget_all
-- Part of a query: forgets every file.
delete from {file}

-- name: referenced_files
-- Every referenced file with its facts and references, by filename and partition.
select f.filename as f_filename, f.byte_count, f.row_count as f_row_count, f.min_key, f.max_key,
    f.added_at, {reference_columns}
from {file_reference} r
join {file} f using (file_id)
order by f.filename, r.partition_id;

-- name: files_in
-- The files of some partitions with their facts and their references there, by filename and partition.
select f.filename as f_filename, f.byte_count, f.row_count as f_row_count, f.min_key, f.max_key,
    f.added_at, {reference_columns}
from {file_reference} r
join {file} f using (file_id)
where r.partition_id = any(%(partition_ids)s)
order by f.filename, r.partition_id;

-- name: unreferenced_files
-- The first files by name that nothing refers to.
select f.filename, f.byte_count, f.row_count, f.min_key, f.max_key,
    nullif(f.unreferenced_at, 'infinity') as unreferenced_at
from {file} f
where not exists (select from {file_reference} r where r.file_id = f.file_id)
order by f.filename
limit %(limit)s;

-- name: has_files
-- Whether any file is tracked.
select exists (select from {file});

-- name: counts
-- How many references, rows, files and bytes there are, and whether the rows are counted exactly.
select r.count, r.row_count, r.exact, f.count, f.byte_count, u.count
from (
    select count(*), coalesce(sum(row_count), 0)::bigint as row_count,
        coalesce(not bool_or(count_approximate), true) as exact
    from {file_reference}
) r, (
    select count(*), coalesce(sum(byte_count), 0)::bigint as byte_count
    from {file} f
    where exists (select from {file_reference} r where r.file_id = f.file_id)
) f, (
    select count(*) from {file} f where not exists (select from {file_reference} r where r.file_id = f.file_id)
) u;

-- name: stamp_unreferenced
-- Garbage collection, stage one: stamps files whose last reference went since the last run, with that moment.
with state as materialized (
    -- not "for update": commits with an id take the row's key in share mode
    select collected_till from tables where table_id = %(table_id)s for no key update
), gone as (
    select g.file_id, max(g.removed_at) as removed_at
    from state s
    cross join lateral (
        select file_id, removed_at
        from removed_reference
        where table_id = %(table_id)s
            and removed_xid >= pg_snapshot_xmin(s.collected_till)
            and not pg_visible_in_snapshot(removed_xid, s.collected_till)
    ) g
    group by g.file_id
), free as materialized (
    -- "offset 0" and the array below keep to the indexes, where joins would read whole tables
    select * from gone where not exists (select from {file_reference} r where r.file_id = gone.file_id offset 0)
), stamped as (
    update {file} f
    set unreferenced_at = free.removed_at
    from free
    where f.file_id = any(array(select file_id from free)) and f.file_id = free.file_id
        and f.unreferenced_at = 'infinity'
    returning f.file_id
), remembered as (
    update tables set collected_till = pg_current_snapshot() where table_id = %(table_id)s
)
select count(*) from stamped;

-- name: ready_for_gc
-- A page of the files whose last reference went before a time, stamped or not yet, by id.
select file_id, filename
from (
    select f.file_id, f.filename
    from {file} f
    where f.unreferenced_at < %(before)s and f.unreferenced_at < 'infinity' and f.file_id > %(after)s
    union all
    select f.file_id, f.filename
    from (
        select file_id
        from removed_reference r, (select collected_till from tables where table_id = %(table_id)s) s
        where r.table_id = %(table_id)s and r.file_id > %(after)s
            and r.removed_xid >= pg_snapshot_xmin(s.collected_till)
            and not pg_visible_in_snapshot(r.removed_xid, s.collected_till)
        group by file_id
        having max(removed_at) < %(before)s
    ) gone
    join {file} f using (file_id)
    where f.unreferenced_at = 'infinity'
) ready
where not exists (select from {file_reference} r where r.file_id = ready.file_id offset 0)
order by file_id
limit %(limit)s;

-- name: forget
-- Forgets files that nothing refers to; gives those that are unknown or referenced.
with input as materialized (
    select *
    from unnest(%(file_ids)s::uuid[], %(filenames)s::text[]) as t (file_id, filename)
    order by file_id
), locked as materialized (
    select i.file_id, i.filename, l.found
    from input i
    left join lateral (
        select true as found from {file} f where f.file_id = i.file_id for update
    ) l on true
), refused as materialized (
    select filename, found is not null as tracked
    from locked
    where found is null or exists (select from {file_reference} r where r.file_id = locked.file_id)
), forgotten as (
    delete from {file} f
    using locked l
    where f.file_id = l.file_id and not exists (select from refused)
)
select filename, tracked from refused order by filename;
