-- name: hold
-- Locks a table's watermark until the transaction ends; returns it, and whether the last look at everything was within a day
-- and with the same criteria.
insert into watermark (table_id, purpose)
values (%(table_id)s, %(purpose)s)
on conflict (table_id, purpose) do update set version = watermark.version + 1
returning till::text, epoch, {is_fresh};

-- name: is_fresh
-- Part of a query: whether the last look at everything was within a day and with the same criteria.
coalesce(whole_at > clock_timestamp() - interval '1 day' and facts = %(facts)s, false)

-- name: changed
-- Part of a look: the partitions to which references were added since the last look, and those that are marked.
changed as materialized (
    select r.partition_id
    from {file_reference} r
    where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(%(till)s::pg_snapshot)
        and not pg_visible_in_snapshot(r.added_xid, %(till)s::pg_snapshot)
    union
    select partition_id from dirty_partition where table_id = %(table_id)s and purpose = %(purpose)s
    union
    -- the leaves that were sealed and created since
    select unnest(e.sealed || e.created) collate "C"
    from epoch e
    where e.table_id = %(table_id)s and e.epoch > %(epoch)s
)

-- name: everything
-- Part of a look at everything: all partitions.
changed as (
    select partition_id from partition where table_id = %(table_id)s and merged_epoch is null
)

-- name: its_partition
-- Part of a look: the partition of each c. "offset 0" forces a look-up by key, whatever the statistics say.
cross join lateral (
    select * from partition p where p.table_id = %(table_id)s and p.partition_id = c.partition_id offset 0
) p

-- name: remembered
-- Part of a look: records that it saw what this statement's snapshot sees, and leaves only partitions that are due marked.
forgotten as (
    delete from dirty_partition where table_id = %(table_id)s and purpose = %(purpose)s
), marked as (
    insert into dirty_partition (table_id, purpose, partition_id)
    select %(table_id)s, %(purpose)s, partition_id from due
), remembered as (
    update watermark
    set till = pg_current_snapshot(), facts = %(facts)s, looked_at = clock_timestamp(),
        epoch = (select epoch from tables where table_id = %(table_id)s),
        whole_at = case when %(whole)s then clock_timestamp() else whole_at end
    where table_id = %(table_id)s and purpose = %(purpose)s
)

-- name: mark_freed
-- Part of an update: marks the partitions of references that jobs released, as a look would not notice these by snapshot.
mark_freed as (
    insert into dirty_partition (table_id, purpose, partition_id)
    select distinct %(table_id)s::integer, purpose, partition_id
    from freed, unnest(array['jobs', 'pushes']) as purpose
)
