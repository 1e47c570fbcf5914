-- name: lock_table
-- Waits for other edits of the table, and makes later ones wait until the transaction ends.
select pg_advisory_xact_lock(hashtextextended('edits', %(table_id)s));

-- name: wait_at_most
-- Limits waits for locks, until wait_as_before.
select set_config('dormouse.lock_timeout', current_setting('lock_timeout'), true),
    set_config('lock_timeout', %(wait_ms)s::int::text, true);

-- name: wait_as_before
-- Gives waits for locks the limit that they had.
select set_config('lock_timeout', current_setting('dormouse.lock_timeout'), true);

-- name: lock_keys
-- The same, but only for edits of some keys and of the whole table. All transactions lock in the order of the hashes.
select pg_advisory_xact_lock_shared(hashtextextended('edits', %(table_id)s)), (
    select count(pg_advisory_xact_lock(h.hash))
    from (
        select distinct hashtextextended(encode(key, 'hex'), %(table_id)s) as hash
        from unnest(%(min_keys)s::bytea[]) as key
        order by hash
        offset 0
    ) h
);

-- name: added
-- Part of a query: the files that ingests added since a snapshot, and the spans of the wanted keys, whose ends are beginnings of
-- keys.
since as materialized (
    select %(snapshot)s::pg_snapshot as snapshot, pg_snapshot_xmin(%(snapshot)s::pg_snapshot) as xmin
), span as materialized (
    select * from unnest(%(min_keys)s::bytea[], %(max_keys)s::bytea[]) as s (min_key, max_key)
), added as (
    select r.file_id
    from {file_reference} r
    where r.partition_id <> '' and r.ingested and r.added_xid >= (select xmin from since)
        and not pg_visible_in_snapshot(r.added_xid, (select snapshot from since))
    union
    select r.file_id
    from removal g
    cross join lateral unnest(g.file_ids, g.added_xids, g.ingested) as r (file_id, added_xid, ingested)
    where g.table_id = %(table_id)s and g.removed_xid >= (select xmin from since) and g.partition_id <> '' and r.ingested
        and not pg_visible_in_snapshot(r.added_xid, (select snapshot from since))
)

-- name: near
-- Part of a query: the added files that may have rows in the spans; null for a collected file, whose keys are not known.
select f.filename
from added a
left join lateral (select f.* from ({file_facts}) f where f.file_id = a.file_id offset 0) f on true
where f.file_id is null or exists (
    select from span s
    where (f.max_key < s.min_key) is not true and (substring(f.min_key for length(s.max_key)) > s.max_key) is not true
)

-- name: events
-- Part of a query: whether deletions or restores since the snapshot may have changed rows in the spans, or what changed them
-- is not recorded any more: a day of the log was dropped, all rows were cleared, or a deletion was forgotten. Deletions have
-- consecutive numbers, and the last one is never forgotten.
(
    exists (
        select from deletion d
        where d.table_id = %(table_id)s and d.added_xid >= (select xmin from since)
            and not pg_visible_in_snapshot(d.added_xid, (select snapshot from since))
            and (
                exists (
                    select from span s
                    where (substring(s.min_key for length(d.max_key)) > d.max_key) is not true
                        and (substring(d.min_key for length(s.max_key)) > s.max_key) is not true
                )
                or d.deletion_id > 1 and not exists (
                    select from deletion b where b.table_id = d.table_id and b.deletion_id = d.deletion_id - 1
                )
            )
    )
    or exists (select from tables t where t.table_id = %(table_id)s and not {is_logged})
    or exists (
        select from restored r
        where r.table_id = %(table_id)s and r.restored_xid >= (select xmin from since)
            and not pg_visible_in_snapshot(r.restored_xid, (select snapshot from since))
    )
)

-- name: disturbed
-- Whether ingests, deletions or restores since a snapshot may have changed rows with keys in some spans: the names of files with
-- such rows, at most "limit", and whether another change did. Also the position up to which it looked.
with {added}
select array({near} limit %(limit)s), {events}, t.epoch, pg_current_snapshot()::text, clock_timestamp()
from tables t
where t.table_id = %(table_id)s;

-- name: check_undisturbed
-- Raises not_whole if ingests, deletions or restores since a snapshot may have changed rows with keys in some spans.
with {added}
select case when exists ({near}) or {events} then not_whole() end;
