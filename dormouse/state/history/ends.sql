-- name: ends
-- Part of a query: some moments of a table in the order given, as JSON: the position of each, and since when the table can be
-- read. The kinds of moments:
-- id, name: a cut; also the cut of the truncation, whose own row is deleted
-- known: a position
-- beginning: before the first row, if all of the history can be read
-- head: where the table was truncated
-- now
select json_agg(json_build_object(
        'kind', w.kind, 'cut_id', c.cut_id, 'name', c.name, 'at', c.at, 'epoch', c.epoch, 'snapshot', c.snapshot,
        'since', greatest(t.history_since, case when w.kind <> 'known' then u.recorded_at end),
        'made_at', (
            select (extract(epoch from e.created_at) * 1000000)::bigint
            from epoch e
            where w.kind in ('id', 'name') and e.table_id = t.table_id and e.epoch = c.epoch
        )
    ) order by w.number) as ends
from tables t
left join truncation u using (table_id)
cross join unnest(
    %(kinds)s::text[], %(names)s::text[], %(cut_ids)s::bigint[], %(ats)s::timestamptz[], %(epochs)s::bigint[],
    %(snapshots)s::text[]
) with ordinality as w (kind, name, cut_id, at, epoch, snapshot, number)
left join lateral (
    select c.cut_id, c.name, c.recorded_at as at, c.epoch, c.snapshot::text
    from cut c
    where w.kind = 'id' and c.table_id = t.table_id and c.cut_id = w.cut_id
    union all
    select c.cut_id, c.name, c.recorded_at, c.epoch, c.snapshot::text
    from cut c
    where w.kind = 'name' and c.table_id = t.table_id and c.name = w.name collate "C"
    union all
    select u.cut_id, null, u.recorded_at, u.epoch, u.snapshot::text
    where w.kind = 'id' and u.cut_id = w.cut_id
        and not exists (select from cut c where c.table_id = t.table_id and c.cut_id = u.cut_id offset 0)
    union all
    select null, null, w.at, w.epoch, w.snapshot where w.kind = 'known'
    union all
    select null, null, clock_timestamp(), t.epoch,
        (case when pg_is_in_recovery() then replayed_snapshot(t.table_id) else pg_current_snapshot() end)::text
    where w.kind = 'now'
    union all
    select null, null, t.history_since, 0, '1:1:'
    where w.kind = 'beginning' and u.table_id is null and t.history_since < t.created_at + interval '1 minute'
    union all
    select null, null, null, coalesce(u.epoch, 0), '1:1:' where w.kind = 'head'
    offset 0
) c on true
where t.table_id = %(table_id)s

-- name: find
-- Returns some moments.
{ends};

-- name: since
-- Returns since when a table can be read.
select greatest(t.history_since, u.recorded_at) from tables t left join truncation u using (table_id) where t.table_id = %(table_id)s;

-- name: names
-- Returns the names of a table's newest named cuts, the newest first.
select name from cut where table_id = %(table_id)s and name is not null order by cut_id desc limit %(limit)s;
