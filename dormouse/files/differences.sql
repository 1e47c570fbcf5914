-- name: remembered_differences
-- What was found when the table was counted again, and is not accepted.
select nullif(partition_id, '') as partition_id, nullif(filename, '') as filename, detail, found_at
from difference
where table_id = %(table_id)s and accepted_at is null
order by found_at, partition_id, filename, detail
limit %(limit)s;

-- name: accept_differences
-- Takes what is there for right from now on; gives what was found.
update difference
set accepted_at = clock_timestamp()
where table_id = %(table_id)s and accepted_at is null
returning detail;

-- name: let_go
-- Logs files that nothing refers to as removed, so that collection finds them; of no partition, and without rows, as totals
-- are to be changed by no reference.
insert into removal (
    table_id, partition_id, file_ids, row_counts, counts_approximate, only_contain_data_for_this_partition,
    added_xids, ingested
)
select %(table_id)s, '', array_agg(f.file_id), array_agg(0::bigint), array_agg(true), array_agg(true),
    array_agg(pg_current_xact_id()), array_agg(true)
from unnest(%(file_ids)s::uuid[]) as f (file_id);

-- name: lost_references
-- References that are lost of files that came since the log of removals is whole: the partitions to which a file was
-- given have less than its rows, or of two halves of a partition one has no reference to it; nor did they have it before.
-- Files of callers' names may have rows that are in no partition.
with recent as materialized (
    select f.file_id, f.filename, f.row_count
    from ({file_facts}) f, instance i
    where f.added_at > i.removals_since and f.filename ^@ any(%(prefixes)s::text[])
), known as materialized (
    select r.file_id, r.partition_id, r.row_count, r.count_approximate, r.ingested
    from {file_reference} r
    where {live} and exists (select from recent f where f.file_id = r.file_id)
    union all
    select r.file_id, g.partition_id, r.row_count, r.count_approximate, r.ingested
    from removal g
    cross join lateral unnest(g.file_ids, g.row_counts, g.counts_approximate, g.ingested)
        as r (file_id, row_count, count_approximate, ingested)
    where g.table_id = %(table_id)s and exists (select from recent f where f.file_id = r.file_id)
), half as (
    select k.file_id, p.partition_id as divided, case p.left_id when k.partition_id then p.right_id else p.left_id end as other
    from known k
    join partition c on c.table_id = %(table_id)s and c.partition_id = k.partition_id
    join partition p on p.table_id = %(table_id)s and p.partition_id = c.parent_id
    where not k.ingested
), lost as (
    select null::text as partition_id, f.filename,
        format('the partitions that it was given to have %s of its %s rows: a reference is lost, and its rows are missing '
            'from queries', sum(k.row_count), f.row_count) as detail
    from recent f
    join known k on k.file_id = f.file_id and k.ingested
    group by f.file_id, f.filename, f.row_count
    having sum(k.row_count) < f.row_count and not bool_or(k.count_approximate)
    union all
    select distinct h.other, f.filename,
        format('%s was divided, and the reference of this half is lost: its rows are missing from queries', h.divided)
    from half h
    join recent f on f.file_id = h.file_id
    where exists (select from known k where k.file_id = h.file_id and k.partition_id = h.divided)
        and not exists (select from known k where k.file_id = h.file_id and k.partition_id = h.other)
)
select *
from lost l
where not exists (
    select from difference d
    where d.table_id = %(table_id)s and d.partition_id = coalesce(l.partition_id, '') and d.filename = l.filename
        and d.detail = l.detail and d.accepted_at is not null
)
limit %(limit)s;
