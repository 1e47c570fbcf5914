-- name: state
-- The index of a column of a build: whether it is there, valid, and being made. No row where the build does not have the
-- column, or has its index.
select
    i.indexrelid is not null,
    coalesce(i.indisvalid, false),
    exists (select 1 from pg_catalog.pg_stat_progress_create_index p where p.relid = to_regclass(%(current)s))
from build b left join pg_catalog.pg_index i on i.indexrelid = to_regclass(%(index)s)
where b.build_id = %(build_id)s and %(column_id)s = any(b.column_ids) and not %(column_id)s = any(b.indexed_ids);

-- name: mark
-- Records that a column has an index. Without `is_needed` it never gets one; else only if the index is valid.
update build
set indexed_ids = indexed_ids || %(column_id)s::integer
where build_id = %(build_id)s and not %(column_id)s = any(indexed_ids)
    and (
        not %(is_needed)s
        or exists (
            select 1 from pg_catalog.pg_index i where i.indexrelid = to_regclass(%(index)s) and i.indisvalid
        )
    );

-- name: cancel
-- Ends the statements that make an index of a build's column.
select pg_cancel_backend(pid)
from pg_catalog.pg_stat_progress_create_index
where relid = to_regclass(%(current)s) and datname = current_database();

-- name: of_texts
-- The indexes of a build's columns of text.
select i.indexrelid::regclass::text
from pg_catalog.pg_index i
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
where i.indrelid = to_regclass(%(current)s) and a.atttypid = 'text'::regtype;

-- name: note_use
-- Records which column indexes were scanned since this was recorded last.
insert into column_index as c (build_id, column_id, scan_count)
select b.build_id, ids.column_id, coalesce(s.idx_scan, 0)
from build b
    cross join lateral unnest(b.indexed_ids) ids (column_id)
    join pg_catalog.pg_stat_user_indexes s
        on s.indexrelid = to_regclass(format('current_%%s_c_%%s', b.build_id, ids.column_id))
where b.build_id = %(build_id)s
on conflict on constraint column_index_pkey do update
set scan_count = excluded.scan_count, scanned_at = clock_timestamp()
where c.scan_count <> excluded.scan_count;

-- name: forget_unused
-- Forgets the column indexes that were not scanned for so long; they are still to be dropped.
with unused as (
    delete from column_index
    where build_id = %(build_id)s and scanned_at < clock_timestamp() - make_interval(secs => %(unused_seconds)s)
    returning column_id
), forgotten as (
    update build b
    set indexed_ids = array(
        select i.column_id
        from unnest(b.indexed_ids) with ordinality i (column_id, place)
        where i.column_id not in (select column_id from unused)
        order by i.place
    )
    where b.build_id = %(build_id)s and exists (select 1 from unused)
)
select column_id from unused order by column_id;
