-- name: remembered_differences
-- What was found when the table was counted again, and is not accepted.
select nullif(partition_id, '') as partition_id, nullif(filename, '') as filename, detail, found_at
from difference
where table_id = %(table_id)s and accepted_at is null
order by filename = '', partition_id, filename, detail
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
-- Files of callers' names may have rows that are in no partition. Grouped, not joined: whatever the statistics say.
with known as materialized (
    select r.file_id, r.partition_id, r.row_count, r.count_approximate, r.only_contains_data_for_this_partition as is_whole,
        r.ingested
    from {file_reference} r
    where {live}
    union all
    select r.file_id, g.partition_id, r.row_count, r.count_approximate, r.is_whole, r.ingested
    from removal g
    cross join lateral unnest(
        g.file_ids, g.row_counts, g.counts_approximate, g.only_contain_data_for_this_partition, g.ingested
    ) as r (file_id, row_count, count_approximate, is_whole, ingested)
    where g.table_id = %(table_id)s
), short as (
    select file_id, sum(row_count) as row_count
    from (
        select file_id, row_count, count_approximate, null::bigint as wanted from known where ingested
        union all
        select f.file_id, 0, false, f.row_count
        from ({file_facts}) f, instance i
        where f.added_at > i.removals_since
    ) k
    group by file_id
    -- without any reference it is one that nothing refers to
    having sum(row_count) < max(wanted) and count(*) > count(wanted) and not bool_or(count_approximate)
), half as (
    select file_id, divided, min(half) as half
    from (
        select file_id, partition_id as divided, true as was_there, null as half from known
        union all
        select k.file_id, c.parent_id, false, k.partition_id
        from known k
        cross join lateral (
            select parent_id from partition p where p.table_id = %(table_id)s and p.partition_id = k.partition_id offset 0
        ) c
        where not k.ingested and not k.is_whole
    ) k
    group by file_id, divided
    having bool_or(was_there) and count(distinct half) = 1
), lost as (
    select null::text as partition_id, f.filename,
        format('the partitions that it was given to have %s of its %s rows: a reference is lost, and its rows are missing '
            'from queries', s.row_count, f.row_count) as detail
    from short s
    cross join lateral (select f.* from ({file_facts}) f where f.file_id = s.file_id offset 0) f
    where f.filename ^@ any(%(prefixes)s::text[])
    union all
    select case p.left_id when h.half then p.right_id else p.left_id end, f.filename,
        format('%s was divided, and the reference of this half is lost: its rows are missing from queries', h.divided)
    from half h
    cross join instance i
    cross join lateral (select f.* from ({file_facts}) f where f.file_id = h.file_id offset 0) f
    cross join lateral (
        select left_id, right_id from partition p where p.table_id = %(table_id)s and p.partition_id = h.divided offset 0
    ) p
    where f.added_at > i.removals_since and f.filename ^@ any(%(prefixes)s::text[])
)
select *
from lost l
where not exists (
    select from difference d
    where d.table_id = %(table_id)s and d.partition_id = coalesce(l.partition_id, '') and d.filename = l.filename
        and d.detail = l.detail and d.accepted_at is not null
)
limit %(limit)s;
