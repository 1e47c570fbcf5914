-- name: check_references
-- References whose file is not tracked.
select r.partition_id, r.filename, 'the row of the file is lost: queries of the partition fail' as detail
from {file_reference} r
where {live} and not exists (select from ({file_facts}) f where f.file_id = r.file_id)
limit %(limit)s;

-- name: check_files
-- Unreferenced files that garbage collection does not know of, as it saw no removal of a reference. Uses set operations:
-- without statistics, joins would compare each row with each.
select null::text as partition_id, f.filename,
    'nothing refers to it, and no removal tells why: its rows are missing from queries' as detail
from (
    select f.file_id from ({file_facts}) f where f.unreferenced_at is null
    except
    select r.file_id from {file_reference} r where {live}
    except
    ({gone_since})
    limit %(limit)s
) l
cross join lateral (select f.* from ({file_facts}) f where f.file_id = l.file_id offset 0) f;

-- name: check_places
-- Partitions that have files but are not in the tree.
select r.partition_id, min(r.filename) as filename, 'it has files, and is not in the tree: their rows are missing from queries' as detail
from {file_reference} r
where {live} and not exists (
    select from partition p
    where p.table_id = %(table_id)s and p.partition_id = r.partition_id and p.merged_epoch is null
)
group by r.partition_id
limit %(limit)s;

-- name: check_rows
-- References to all rows of a file whose row count differs from the file's.
select r.partition_id, r.filename,
    format('the reference has %s rows, the file %s', r.row_count, f.row_count) as detail
from {file_reference} r
join ({file_facts}) f on f.file_id = r.file_id
where {live} and r.only_contains_data_for_this_partition and not r.count_approximate and r.row_count <> f.row_count
limit %(limit)s;

-- name: check_claims
-- References that are claimed by a job that does not exist.
select r.partition_id, r.filename,
    format('claimed by job %s, which does not exist: it will never be compacted', r.job_id) as detail
from {file_reference} r
where {live} and r.job_id is not null and not exists (
    select from compaction_job j
    where j.table_id = %(table_id)s and j.job_id = r.job_id and j.partition_id = r.partition_id
)
limit %(limit)s;

-- name: check_log
-- References that the log of removals has but that still exist, and incomplete log entries.
select g.partition_id, r.filename, 'the log of removals has the reference, and it is there' as detail
from removal g
cross join lateral unnest(g.file_ids, g.added_xids) as gone (file_id, added_xid)
join {file_reference} r
    on r.partition_id = g.partition_id and r.file_id = gone.file_id and r.added_xid = gone.added_xid
where g.table_id = %(table_id)s
union all
select partition_id, null, 'a removal of the log does not have one of everything for each file'
from removal
where table_id = %(table_id)s and (
    cardinality(file_ids) <> cardinality(row_counts) or cardinality(file_ids) <> cardinality(counts_approximate)
    or cardinality(file_ids) <> cardinality(added_xids) or cardinality(file_ids) <> cardinality(ingested)
)
limit %(limit)s;

-- name: check_page
-- A page of the files with their facts, sorted by id; if wanted, also the number of their references, and the partition that
-- has all their rows.
select f.filename, f.byte_count, uuid_send(f.digest), f.unreferenced_at is null, %(table)s::text, f.row_count, f.file_id,
    f.min_key, f.max_key, r.count, r.partition_id
from (
    select f.* from ({file_facts}) f where f.file_id > %(after)s order by f.file_id limit %(limit)s
) f
cross join lateral (
    select count(*) as count, max(r.partition_id) filter (where r.only_contains_data_for_this_partition) as partition_id
    from {file_reference} r
    where %(with_references)s and uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id and {live}
    offset 0
) r
order by f.file_id;

-- name: check_again
-- Those of some files that are referenced, with their sizes.
select f.file_id, f.byte_count
from unnest(%(file_ids)s::uuid[]) as o (file_id)
cross join lateral (select f.* from ({file_facts}) f where f.file_id = o.file_id offset 0) f
where exists (
    select from {file_reference} r
    where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id and {live}
    offset 0
);

-- name: check_unknown
-- Those of some objects that are neither a file of the table nor the sketches of one.
select o.name
from unnest(%(names)s::text[], %(file_ids)s::uuid[]) as o (name, file_id)
where not exists ({is_tracked});

-- name: check_deletions
-- Deletions that list rows in a file of the database which is lost.
select null::text as partition_id, substring(d.condition from %(listed)s) as filename,
    format('the rows that deletion %s lists are not in the database', d.deletion_id) as detail
from deletion d
where d.table_id = %(table_id)s and d.condition ~ %(listed)s and not exists (
    select from deletion_content c where c.table_id = d.table_id and c.deletion_id = d.deletion_id
)
limit %(limit)s;

-- name: listed
-- The files in the database with rows that deletions list.
select substring(d.condition from %(listed)s)
from deletion d
where d.table_id = %(table_id)s and d.condition ~ %(listed)s
order by d.deletion_id;

-- name: check_contents
-- Inlined files whose content is lost or has another size.
select null::text as partition_id, f.filename,
    case when c.file_id is null then 'its content is not in the database' else 'its content has another size' end as detail
from ({file_facts}) f
left join lateral (select c.* from {file_content} c where c.file_id = f.file_id offset 0) c on true
where f.filename ~ %(inlined)s and octet_length(c.content) is distinct from f.byte_count
limit %(limit)s;
