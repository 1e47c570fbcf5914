-- name: begin_load
-- Turns off triggers, so that a copied row does not look up its table.
set session_replication_role = replica; set maintenance_work_mem = '512MB'; set synchronous_commit = off;

-- name: indexes
-- The indexes and primary keys of both tables, with the statements that create them again after the load.
select i.indexrelid::regclass::text, i.indrelid::regclass::text, c.conname,
    case when c.oid is null then pg_get_indexdef(i.indexrelid)
        else format('alter table %s add constraint %I %s', i.indrelid::regclass, c.conname, pg_get_constraintdef(c.oid)) end
from pg_index i
left join pg_constraint c on c.conindid = i.indexrelid and c.contype = 'p'
where i.indrelid in ('partition'::regclass, 'epoch'::regclass);

-- name: copy_partitions
-- Partitions in their final state.
copy partition (
    table_id, partition_id, parent_id, created_epoch, sealed_epoch, min_keys, max_keys, split_key, split_point,
    left_id, right_id, is_upper, merged_epoch, merged_id, sealed_rows, sealed_bytes
) from stdin

-- name: copy_epochs
-- Epochs after the first.
copy epoch (table_id, epoch, created_at, sealed, created, splits, merges, sealed_rows, sealed_bytes, added_xid) from stdin

-- name: copy_chunks
-- Running totals.
copy history_chunk (table_id, chunk, splits, merges, sealed_rows, sealed_bytes) from stdin

-- name: link
-- Sets the children of each parent to the partitions that replaced its first children.
update partition p
set left_id = coalesce(l.now, p.left_id), right_id = coalesce(r.now, p.right_id)
from partition q
left join unnest(%(before)s::text[], %(now)s::text[]) as l (before, now) on l.before = q.left_id
left join unnest(%(before)s::text[], %(now)s::text[]) as r (before, now) on r.before = q.right_id
where q.table_id = %(table_id)s and p.table_id = q.table_id and p.partition_id = q.partition_id
    and q.created_epoch = 0 and q.sealed_epoch = 0;

-- name: begin_history
-- Deletes the leaves, which are copied again in their final state, and dates the first epoch before the others.
with deleted as (
    delete from partition where table_id = %(table_id)s and sealed_epoch is null
)
update epoch set created_at = %(time)s where table_id = %(table_id)s;

-- name: end_history
-- Sets the table to the last epoch and makes all of its history readable.
update tables
set epoch = %(epoch)s, created_at = %(time)s, history_since = %(time)s
where table_id = %(table_id)s;

-- name: add_cuts
-- Adds pairs of cuts, evenly spread. The cuts of a pair are `away` epochs apart; an epoch is a second. All cuts see all files.
insert into cut (table_id, recorded_at, epoch, snapshot, rows_till, bytes_till, counted_from)
select %(table_id)s, %(time)s + e.at * interval '1 second', floor(e.at), pg_current_snapshot(),
    1000000 * row_number() over (order by e.at), 40000000 * row_number() over (order by e.at), 1
from generate_series(1, %(pairs)s) n
cross join (values (0), (%(away)s)) as k (later)
cross join lateral (select n * (%(epochs)s - %(away)s)::numeric / %(pairs)s + k.later as at) e
order by e.at;

-- name: size
-- The bytes of a history on disk, with its indexes.
select pg_total_relation_size('partition') + pg_total_relation_size('epoch') + pg_total_relation_size('history_chunk');

-- name: by_indexes_alone
-- Forces index scans, for the statements of `walks`.
set enable_seqscan = off; set enable_bitmapscan = off; set enable_sort = off;

-- name: walks
-- For each index, a statement that reads all of it, to load it into memory.
select format(
    'select count(*) from (select from %s where %s order by %s offset 0) x', i.indrelid::regclass,
    coalesce(pg_get_expr(i.indpred, i.indrelid), 'true'),
    (select string_agg(pg_get_indexdef(i.indexrelid, n, true), ', ' order by n) from generate_series(1, i.indnkeyatts) n)
)
from pg_index i
where i.indrelid in ('partition'::regclass, 'epoch'::regclass);
