-- name: add_files
-- Adds files that are not tracked yet, with their references; gives those that are tracked already.
with new_file as materialized (
    select *
    from unnest(
        %(file_ids)s::uuid[], %(filenames)s::text[], %(byte_counts)s::bigint[], %(row_counts)s::bigint[],
        %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(referenced)s::boolean[]
    ) as t (file_id, filename, byte_count, row_count, min_key, max_key, referenced)
), tracked as (
    {track}
), added as (
    {into_references}
    select %(table_id)s, t.*
    from unnest(
        %(ref_partition_ids)s::text[], %(ref_file_ids)s::uuid[], %(ref_filenames)s::text[],
        %(ref_row_counts)s::bigint[], %(ref_approximate)s::boolean[], %(ref_only)s::boolean[]
    ) as t (partition_id, file_id, filename, row_count, count_approximate, only_contains_data)
    where file_id in (select file_id from tracked)
)
select filename from new_file where file_id not in (select file_id from tracked) order by filename;

-- name: assign
-- Assigns references to jobs, in the order of their keys, when none is missing or assigned; gives how many.
with input as materialized (
    select *
    from unnest(%(partition_ids)s::text[], %(file_ids)s::uuid[], %(job_ids)s::text[])
        as t (partition_id, file_id, job_id)
    order by partition_id, file_id
), locked as materialized (
    select i.*
    from input i
    cross join lateral (
        select r.job_id
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id
        for update
    ) l
    where l.job_id is null
), assigned as (
    update {file_reference} r
    set job_id = l.job_id, last_updated = clock_timestamp()
    from locked l
    where r.partition_id = l.partition_id and r.file_id = l.file_id
        and (select count(*) from locked) = (select count(*) from input)
    returning r.job_id, r.partition_id
), claimed as (
    insert into compaction_job (table_id, job_id, partition_id)
    select distinct %(table_id)s::integer, job_id, partition_id from assigned
    on conflict do nothing
)
select count(*) from assigned;

-- name: unassign_job
-- Releases every reference that a job holds, and forgets the job. One that replaced a part of its inputs is
-- forgotten already: what it kept is looked for on every partition.
with job as (
    delete from compaction_job where table_id = %(table_id)s and job_id = %(job_id)s returning partition_id
), held as materialized (
    select r.partition_id, r.file_id
    from job
    join {file_reference} r on r.partition_id = job.partition_id and r.job_id = %(job_id)s
    union all
    select r.partition_id, r.file_id
    from {file_reference} r
    where r.job_id = %(job_id)s and not exists (select from job)
), locked as materialized (
    select l.*
    from (select * from held order by partition_id, file_id) h
    cross join lateral (
        select r.partition_id, r.file_id
        from {file_reference} r
        where r.partition_id = h.partition_id and r.file_id = h.file_id and r.job_id = %(job_id)s
        for update
    ) l
)
update {file_reference} r
set job_id = null, last_updated = clock_timestamp()
from locked l
where r.partition_id = l.partition_id and r.file_id = l.file_id;

-- name: replace
-- Replaces each job's inputs by its output, for the requests that are valid; gives their numbers, and
-- whether every output could be tracked.
with input as materialized (
    select *
    from unnest(
        %(requests)s::integer[], %(partition_ids)s::text[], %(file_ids)s::uuid[], %(job_ids)s::text[]
    ) as t (request, partition_id, file_id, job_id)
    order by partition_id, file_id
), output as materialized (
    select *
    from unnest(
        %(out_requests)s::integer[], %(out_partition_ids)s::text[], %(out_file_ids)s::uuid[],
        %(out_filenames)s::text[], %(out_row_counts)s::bigint[], %(out_approximate)s::boolean[],
        %(out_only)s::boolean[], %(out_byte_counts)s::bigint[], %(out_min_keys)s::bytea[],
        %(out_max_keys)s::bytea[]
    ) as t (request, partition_id, file_id, filename, row_count, count_approximate, only_contains_data,
            byte_count, min_key, max_key)
), locked as materialized (
    select i.request, l.job_id is not distinct from i.job_id and l.found is not null as ok
    from input i
    left join lateral (
        select r.job_id, true as found
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id
        for update
    ) l on true
), valid as materialized (
    select request from locked group by request having bool_and(ok)
    except
    select o.request from output o where exists ({is_tracked})
), {removal}, new_file as materialized (
    select file_id, filename, byte_count, row_count, min_key, max_key, true as referenced
    from output
    where request in (select request from valid)
), tracked as (
    {track}
), added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data
    from output
    where request in (select request from valid)
    on conflict do nothing
), finished as (
    delete from compaction_job j
    using (select distinct job_id, partition_id from input where request in (select request from valid)) d
    where j.table_id = %(table_id)s and j.job_id = d.job_id and j.partition_id = d.partition_id
)
select coalesce(array_agg(request), '{}') as valid,
    (select count(*) from new_file) = (select count(*) from tracked) as all_tracked
from valid;

-- name: split
-- Replaces unassigned references by others to the same files, for the requests that are valid; gives their
-- numbers, and whether every reference could be added.
with input as materialized (
    select *
    from unnest(%(requests)s::integer[], %(partition_ids)s::text[], %(file_ids)s::uuid[])
        as t (request, partition_id, file_id)
    order by partition_id, file_id
), target as materialized (
    select *
    from unnest(
        %(new_requests)s::integer[], %(new_partition_ids)s::text[], %(new_file_ids)s::uuid[],
        %(new_filenames)s::text[], %(new_row_counts)s::bigint[], %(new_approximate)s::boolean[],
        %(new_only)s::boolean[]
    ) as t (request, partition_id, file_id, filename, row_count, count_approximate, only_contains_data)
), locked as materialized (
    select i.request
    from input i
    cross join lateral (
        select r.job_id
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id
        for update
    ) l
    where l.job_id is null
), valid as materialized (
    select request from locked
    except
    select t.request
    from target t
    cross join lateral (
        select 1 from {file_reference} r
        where r.partition_id = t.partition_id and r.file_id = t.file_id
        limit 1
    ) e
), {removal}, added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data
    from target
    where request in (select request from valid)
    on conflict do nothing
    returning file_id
)
select coalesce(array_agg(request), '{}') as valid,
    (select count(*) from target where request in (select request from valid)) = (select count(*) from added)
        as all_added
from valid;

-- name: reference_states
-- What is known of some references: their number, whether the file is tracked, the reference is there, its job.
select exists ({is_tracked}) as tracked, r.file_id is not null as found, r.job_id
from unnest(%(partition_ids)s::text[], %(file_ids)s::uuid[]) with ordinality o (partition_id, file_id, number)
left join {file_reference} r on r.partition_id = o.partition_id and r.file_id = o.file_id
order by o.number;

-- name: removal
-- Part of an update: removes the references that the valid requests take, and logs them.
removed as (
    delete from {file_reference} r
    using input i
    where i.request in (select request from valid)
        and r.partition_id = i.partition_id and r.file_id = i.file_id
    returning r.*
), logged as (
    insert into removed_reference (
        table_id, partition_id, file_id, row_count, count_approximate,
        only_contains_data_for_this_partition, added_xid
    )
    select table_id, partition_id, file_id, row_count, count_approximate,
        only_contains_data_for_this_partition, added_xid
    from removed
)

-- name: into_references
-- Part of an update: where new references go, and their columns.
insert into {file_reference} (
    table_id, partition_id, file_id, filename, row_count, count_approximate, only_contains_data_for_this_partition
)

-- name: reference_columns
-- Part of a query: the columns of a reference r.
r.filename, r.partition_id, r.row_count, r.job_id, r.last_updated, r.count_approximate,
r.only_contains_data_for_this_partition

-- name: references
-- All references, by partition and filename.
select {reference_columns} from {file_reference} r order by partition_id, filename;

-- name: unassigned_references
-- The references that no job holds, by partition and filename.
select {reference_columns} from {file_reference} r where job_id is null order by partition_id, filename;

-- name: references_in
-- The references of some partitions, by partition and filename.
select {reference_columns}
from {file_reference} r
where partition_id = any(%(partition_ids)s)
order by partition_id, filename;

-- name: partition_to_filenames
-- The files of every partition that has some.
select partition_id, array_agg(filename order by filename) from {file_reference} group by partition_id;

-- name: record_commit
-- Records that a commit is applied; gives nothing when it was applied before.
insert into applied_commit (table_id, commit_key, commit_id, expires_at)
values (
    %(table_id)s, %(commit_key)s, %(commit_id)s,
    clock_timestamp() + make_interval(secs => %(kept_seconds)s::float8)
)
on conflict do nothing
returning commit_key;

-- name: is_applied
-- Whether a commit is applied.
select exists (select from applied_commit where table_id = %(table_id)s and commit_key = %(commit_key)s);

-- name: forget_expired_commits
-- Forgets commits that nobody asks for any more, so many at a time; gives how many.
with expired as (
    select commit_key
    from applied_commit
    where table_id = %(table_id)s and expires_at < clock_timestamp()
    limit %(limit)s
    for update skip locked
), forgotten as (
    delete from applied_commit c
    using expired e
    where c.table_id = %(table_id)s and c.commit_key = e.commit_key
    returning c.commit_key
)
select count(*) from forgotten;

-- name: clear
-- Forgets every file, reference, job and attempt of the table.
with references_gone as (delete from {file_reference}),
jobs_gone as (delete from compaction_job where table_id = %(table_id)s),
log_gone as (delete from removed_reference where table_id = %(table_id)s)
{forget_all};
