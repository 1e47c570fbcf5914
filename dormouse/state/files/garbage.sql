-- name: forget
-- Deletes a limited number of the next epochs before the truncation, and the partitions that left the tree in them. Keeps
-- those that a holder, a writer, or a look may still need. Adds the sums of the deleted epochs to the running total before
-- the first kept one. Returns the numbers of deleted epochs and partitions, and the epochs since, till and bound (Piece).
with bound as materialized (
    select u.forgotten_epoch as since, least(u.epoch, e.epoch, w.epoch) as till
    from truncation u
    cross join lateral (
        select least(
            clock_timestamp() - make_interval(secs => %(delay_seconds)s),
            (
                -- holds of moments after the truncation need no epoch before it
                select min(since) from hold
                where until > clock_timestamp() and (table_id is null or table_id = %(table_id)s) and since < u.recorded_at
            ),
            -- a commit that was planned then names partitions of that time
            (
                select min(started_at) from write_attempt
                where table_id = %(table_id)s and abandoned_at is null and finished_at is null
            )
        ) - make_interval(secs => %(margin_seconds)s) as before
    ) b
    cross join lateral (
        select epoch from epoch
        where table_id = %(table_id)s and created_at < b.before
        order by created_at desc
        limit 1
    ) e
    -- a look that is older than a day reads everything anew, and needs no epochs
    cross join (
        select min(epoch) as epoch from watermark
        where table_id = %(table_id)s
            and (purpose = 'totals' and whole_at is not null or whole_at > clock_timestamp() - interval '1 day')
    ) w
    where u.table_id = %(table_id)s
), next as materialized (
    select epoch, sealed,
        sum(cardinality(sealed) + cardinality(created)) over (order by epoch) as partitions, row_number() over (order by epoch) as number
    from (
        select n.epoch, n.sealed, n.created
        from bound b
        cross join lateral (
            select * from epoch
            where table_id = %(table_id)s and epoch > b.since and epoch <= b.till
            order by epoch
            limit %(epochs_max)s
        ) n
    ) n
), piece as materialized (
    select b.since, b.till as bound, (
            select max(epoch) from next where partitions <= %(partitions_max)s or number = 1
        ) as till
    from bound b
), ended as materialized (
    select distinct p.created_epoch as epoch
    from piece c
    join next n on n.epoch <= c.till
    cross join lateral unnest(n.sealed) as s (partition_id)
    cross join lateral (
        select * from partition p
        where p.table_id = %(table_id)s and p.partition_id = s.partition_id collate "C"
        offset 0
    ) p
    where p.created_epoch < c.till
), old as materialized (
    select e.*
    from piece c
    cross join ended d
    cross join lateral (
        select ctid as place, epoch, created, splits, merges, sealed_rows, sealed_bytes
        from epoch
        where table_id = %(table_id)s and epoch = d.epoch
        offset 0
    ) e
    -- epochs that made partitions which were leaves after the piece are kept: they have the times of these leaves
    where not exists (
        select from unnest(e.created) as m (partition_id)
        cross join lateral (
            select * from partition p
            where p.table_id = %(table_id)s and p.partition_id = m.partition_id collate "C"
            offset 0
        ) p
        where p.sealed_epoch is null or p.sealed_epoch > c.till
    )
), partitions_gone as (
    delete from partition p
    using piece c
    where p.table_id = %(table_id)s and p.merged_epoch > c.since and p.merged_epoch <= c.till
    returning 1
), epochs_gone as (
    delete from epoch where ctid = any(array(select place from old)) returning 1
), total as materialized (
    select coalesce(max(h.chunk), 0) as chunk
    from piece c
    cross join lateral (
        select chunk from history_chunk
        where table_id = %(table_id)s and chunk <= c.till / 1000
        order by chunk desc
        limit 1
    ) h
), totals_gone as (
    delete from history_chunk h using total t where h.table_id = %(table_id)s and h.chunk < t.chunk
), totals_kept as (
    insert into history_chunk (table_id, chunk, splits, merges, sealed_rows, sealed_bytes)
    select %(table_id)s, t.chunk, sum(o.splits), sum(o.merges), sum(o.sealed_rows), sum(o.sealed_bytes)
    from total t
    join old o on o.epoch > t.chunk * 1000
    group by t.chunk
    on conflict (table_id, chunk) do update
    set splits = history_chunk.splits + excluded.splits, merges = history_chunk.merges + excluded.merges,
        sealed_rows = history_chunk.sealed_rows + excluded.sealed_rows,
        sealed_bytes = history_chunk.sealed_bytes + excluded.sealed_bytes
), marked as (
    update truncation u
    set forgotten_epoch = c.till
    from piece c
    where u.table_id = %(table_id)s and c.till is not null
)
select (select count(*) from epochs_gone), (select count(*) from partitions_gone), c.since, coalesce(c.till, c.since), c.bound
from piece c;

-- name: some_pending
-- Some of the pending deletions, at random, so that each is checked sooner or later.
select deletion_id
from deletion
where table_id = %(table_id)s and retired_xid is null
order by random()
limit %(limit)s;

-- name: not_needed
-- Those of some deletions that match no row of a referenced file. For each, walks down the tree where its keys may be.
select o.deletion_id
from unnest(%(deletion_ids)s::bigint[]) as o (deletion_id)
where not exists (
    with recursive d as materialized (
        select * from deletion where table_id = %(table_id)s and deletion_id = o.deletion_id and retired_xid is null
    ), walk as (
        select p.partition_id, p.split_key, p.split_point, p.left_id, p.right_id
        from partition p
        where p.table_id = %(table_id)s and p.parent_id is null and p.is_upper is null and p.merged_epoch is null
        union all
        select p.partition_id, p.split_key, p.split_point, p.left_id, p.right_id
        from walk w
        cross join d
        cross join lateral (
            values
            (w.left_id, d.min_keys[w.split_key + 1] < w.split_point),
            (w.right_id, d.max_keys[w.split_key + 1] >= w.split_point)
        ) as child (partition_id, is_reached)
        join partition p on p.table_id = %(table_id)s and p.partition_id = child.partition_id
        -- null means that the deletion has an open end there, which reaches the half
        where child.is_reached is not false and w.left_id is not null
    )
    select from walk w
    cross join d
    cross join lateral (
        select r.file_id from {file_reference} r where r.partition_id = w.partition_id offset 0
    ) r
    left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
    -- a file whose row is lost may have matching rows
    where f.file_id is null or {may_be_of}
)
-- and no open load of a keyed table with a place before the deletion may still add rows
and not exists (
    select from write_attempt a
    where a.table_id = %(table_id)s and a.deletions_till < o.deletion_id
        and a.abandoned_at is null and a.finished_at is null
);

-- name: retire
-- Retires deletions: readers no longer apply them, except readers of earlier moments.
update deletion
set retired_xid = pg_current_xact_id(), retired_at = clock_timestamp()
where table_id = %(table_id)s and deletion_id = any(%(deletion_ids)s) and retired_xid is null;

-- name: forget_deletions
-- Deletes deletions that were retired so long ago that no readable moment needs them, and records that earlier moments cannot
-- be read from now on. Keeps the last number, so that it is not used again.
with gone as (
    delete from deletion d
    where d.table_id = %(table_id)s
        and d.retired_at < clock_timestamp() - make_interval(secs => %(kept_seconds)s + %(margin_seconds)s)
        and d.deletion_id < (select max(deletion_id) from deletion where table_id = %(table_id)s)
        and not exists (
            select from hold h
            where h.until > clock_timestamp() and (h.table_id is null or h.table_id = %(table_id)s)
                and not pg_visible_in_snapshot(d.retired_xid, h.snapshot)
        )
    returning d.retired_at, d.deletion_id, d.added_xid
), listed_gone as (
    delete from deletion_content c
    using gone g
    where c.table_id = %(table_id)s and c.deletion_id = g.deletion_id and not exists (
            select from deletion d
            where d.table_id = c.table_id and d.deletion_id = c.deletion_id
                and (d.deletion_id, d.added_xid) not in (select deletion_id, added_xid from gone)
        )
)
update tables t
set history_since = greatest(t.history_since, g.retired_at)
from (select max(retired_at) as retired_at from gone) g
where t.table_id = %(table_id)s and g.retired_at is not null;
