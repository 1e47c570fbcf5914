-- name: commits
-- Part of an update: the commits that have an id, by number, and those of them that are applied already.
sent as materialized (
    select *
    from unnest(
        %(sent)s::integer[], %(commit_keys)s::uuid[], %(commit_ids)s::text[], %(contents)s::uuid[],
        %(expire)s::boolean[]
    ) as t (commit, commit_key, commit_id, content, expires)
), before as materialized (
    select s.commit, coalesce(s.content = b.content, true) as same
    from sent s
    cross join lateral (
        select a.content
        from applied_commit a
        where a.table_id = %(table_id)s and a.commit_key = s.commit_key
        offset 0  -- so that it stays a look-up for each
    ) b
)

-- name: recorded
-- Part of an update: records what was applied, in the order of the keys.
recorded as (
    insert into applied_commit (table_id, commit_key, commit_id, content, expires_at)
    select %(table_id)s, commit_key, commit_id, content,
        case when expires then clock_timestamp() + make_interval(secs => %(kept_seconds)s::float8) end
    from sent
    where (select ok from applied)[commit]
    order by commit_key
    on conflict do nothing
    returning commit_key
)

-- name: outcome
-- Part of an update: what became of each unit and commit. Nothing is applied when a commit was applied before.
(select ok from verdict) as applied,
array(select commit from before where same) as before,
array(select commit from before where not same) as reused,
case when (select count(*) from recorded) < (select count(*) from sent where (select ok from applied)[commit])
    then lost_race('another transaction applies the same commit') end

-- name: add_files
-- Adds files with their references, for the commits of which none is tracked; gives those that are.
with {commits}, file as materialized (
    select *
    from unnest(
        %(commits)s::integer[], %(file_ids)s::uuid[], %(filenames)s::text[], %(byte_counts)s::bigint[],
        %(row_counts)s::bigint[], %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(referenced)s::boolean[]
    ) as t (commit, file_id, filename, byte_count, row_count, min_key, max_key, referenced)
), refused as materialized (
    select o.commit, o.filename from file o where exists ({is_tracked})
), verdict as materialized (
    select array_agg(ok order by commit) as ok
    from (
        select commit, bool_and(ok) and not exists (select from before) as ok
        from (
            select generate_series(1, %(count)s::integer) as commit, true as ok
            union all
            select commit, false from refused
        ) checks
        group by commit
    ) commits
), applied as (
    select ok from verdict
), new_file as materialized (
    select * from file where (select ok from verdict)[commit]
), tracked as (
    {track}
), added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data
    from unnest(
        %(ref_commits)s::integer[], %(ref_partition_ids)s::text[], %(ref_file_ids)s::uuid[],
        %(ref_filenames)s::text[], %(ref_row_counts)s::bigint[], %(ref_approximate)s::boolean[],
        %(ref_only)s::boolean[]
    ) as t (commit, partition_id, file_id, filename, row_count, count_approximate, only_contains_data)
    where (select ok from verdict)[commit]
    on conflict do nothing
    returning partition_id, file_id
), {counts_added}, {recorded}
select {outcome},
    case when (select count(distinct file_id) from tracked) < (select count(*) from new_file)
        then lost_race('another transaction adds the same file') end,
    (select jsonb_agg(jsonb_build_array(commit, filename) order by commit, filename) from refused) as refused;

-- name: assign
-- Assigns references to jobs, in the order of their keys, for the commits of which none is missing or assigned.
with {commits}, input as materialized (
    select q.commit, q.partition_id, q.job_id, f.file_id
    from unnest(%(commits)s::integer[], %(partition_ids)s::text[], %(job_ids)s::text[], %(files)s::text[])
        as q (commit, partition_id, job_id, files)
    cross join lateral unnest(q.files::uuid[]) as f (file_id)
    order by q.partition_id collate "C", f.file_id
), locked as materialized (
    select i.commit, i.job_id, l.place, l.place is not null as ok
    from input i
    left join lateral (
        select r.ctid as place
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id and r.job_id is null
        for update
    ) l on true
), verdict as materialized (
    select array_agg(ok order by commit) as ok
    from (
        select commit, bool_and(ok) and not exists (select from before) as ok from locked group by commit
    ) commits
), applied as (
    select ok from verdict
), taken as materialized (
    select place, job_id from locked where (select ok from verdict)[commit]
), assigned as (
    update {file_reference} r
    set job_id = t.job_id, last_updated = clock_timestamp()
    from taken t
    where r.ctid = t.place
    returning 1
), claimed as (
    insert into compaction_job (table_id, job_id, partition_id)
    select distinct %(table_id)s::integer, job_id, partition_id
    from unnest(%(commits)s::integer[], %(partition_ids)s::text[], %(job_ids)s::text[])
        as q (commit, partition_id, job_id)
    where (select ok from verdict)[commit]
    on conflict do nothing
), {recorded}
select {outcome},
    case when (select count(*) from assigned) < (select count(*) from taken)
        then lost_race('another transaction changed a reference') end;

-- name: replace
-- Replaces each job's inputs by its output, for the requests that are valid.
with {commits}, request as materialized (
    select *
    from unnest(%(partition_ids)s::text[], %(job_ids)s::text[], %(inputs)s::text[])
        with ordinality as t (partition_id, job_id, inputs, number)
), input as materialized (
    select q.number, q.partition_id, q.job_id, f.file_id
    from request q
    cross join lateral unnest(q.inputs::uuid[]) as f (file_id)
    order by q.partition_id collate "C", f.file_id
), output as materialized (
    select *
    from unnest(
        %(out_requests)s::integer[], %(out_partition_ids)s::text[], %(out_file_ids)s::uuid[],
        %(out_filenames)s::text[], %(out_row_counts)s::bigint[], %(out_approximate)s::boolean[],
        %(out_only)s::boolean[], %(out_byte_counts)s::bigint[], %(out_min_keys)s::bytea[],
        %(out_max_keys)s::bytea[]
    ) as t (number, partition_id, file_id, filename, row_count, count_approximate, only_contains_data,
            byte_count, min_key, max_key)
), locked as materialized (
    select i.number, l.place, l.place is not null as ok
    from input i
    left join lateral (
        select r.ctid as place
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id and r.job_id = i.job_id
        for update
    ) l on true
), verdict as materialized (
    select array_agg(ok order by number) as ok
    from (
        select number, bool_and(ok) and not exists (select from before) as ok
        from (
            select number, ok from locked
            union all
            select o.number, false from output o where exists ({is_tracked})
        ) checks
        group by number
    ) requests
), {applied}, {removal}, new_file as materialized (
    select file_id, filename, byte_count, row_count, min_key, max_key, true as referenced
    from output
    where (select ok from verdict)[number]
), tracked as (
    {track}
), added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data
    from output
    where (select ok from verdict)[number]
    on conflict do nothing
    returning partition_id, file_id
), {counts_changed}, finished as (
    delete from compaction_job j
    using request q
    where (select ok from verdict)[q.number]
        and j.table_id = %(table_id)s and j.job_id = q.job_id and j.partition_id = q.partition_id
), {recorded}
select {outcome},
    case when (select count(distinct file_id) from tracked) < (select count(*) from new_file)
        then lost_race('another transaction adds the same file') end,
    case when (select count(*) from removed) < (select count(*) from taken)
        then lost_race('another transaction changed a reference') end;

-- name: split
-- Replaces unassigned references by others to the same files, for the requests that are valid.
with {commits}, input as materialized (
    select *
    from unnest(
        %(partition_ids)s::text[], %(file_ids)s::uuid[], %(filenames)s::text[], %(targets)s::text[],
        %(row_counts)s::text[], %(approximate)s::text[], %(only)s::text[]
    ) with ordinality as t (partition_id, file_id, filename, targets, row_counts, approximate, only_contains, number)
    order by partition_id collate "C", file_id
), target as materialized (
    select i.number, i.file_id, i.filename, t.*
    from input i
    cross join lateral unnest(
        i.targets::text[], i.row_counts::bigint[], i.approximate::boolean[], i.only_contains::boolean[]
    ) as t (partition_id, row_count, count_approximate, only_contains_data)
), locked as materialized (
    select i.number, l.place, l.place is not null as ok
    from input i
    left join lateral (
        select r.ctid as place
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id and r.job_id is null
        for update
    ) l on true
), verdict as materialized (
    select array_agg(ok order by number) as ok
    from (
        select number, bool_and(ok) and not exists (select from before) as ok
        from (
            select number, ok from locked
            union all
            select t.number, false
            from target t
            where exists (
                select from {file_reference} r
                where r.partition_id = t.partition_id and r.file_id = t.file_id
                offset 0
            )
        ) checks
        group by number
    ) requests
), {applied}, {removal}, added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data
    from target
    where (select ok from verdict)[number]
    on conflict do nothing
    returning partition_id, file_id
), {counts_changed}, {recorded}
select {outcome},
    case when (select count(*) from added) < (select count(*) from target where (select ok from verdict)[number])
        then lost_race('another transaction adds the same reference') end,
    case when (select count(*) from removed) < (select count(*) from taken)
        then lost_race('another transaction changed a reference') end;

-- name: forget
-- Forgets files that nothing refers to, for the commits of which none is unknown or referenced; gives those.
with {commits}, input as materialized (
    select *
    from unnest(%(commits)s::integer[], %(file_ids)s::uuid[], %(filenames)s::text[]) as t (commit, file_id, filename)
    order by file_id
), locked as materialized (
    select i.*, l.found is not null as tracked
    from input i
    left join lateral (
        {lock_file}
    ) l on true
), refused as materialized (
    select commit, filename, tracked
    from locked
    where not tracked
        or exists (select from {file_reference} r where r.file_id = locked.file_id and {live} offset 0)
), verdict as materialized (
    select array_agg(ok order by commit) as ok
    from (
        select commit, bool_and(ok) and not exists (select from before) as ok
        from (
            select commit, true as ok from input
            union all
            select commit, false from refused
        ) checks
        group by commit
    ) commits
), applied as (
    select ok from verdict
), gone as materialized (
    select file_id from locked where (select ok from verdict)[commit]
), forgotten as (
    {forget_files}
), {recorded}
select {outcome}, null,
    (select jsonb_agg(jsonb_build_array(commit, filename, tracked) order by commit, filename) from refused) as refused;

-- name: applied
-- Part of an update: a commit is applied when one of its requests is.
applied as materialized (
    select array_agg(ok order by commit) as ok
    from (
        select t.commit, bool_or((select ok from verdict)[t.number]) as ok
        from unnest(%(commits)s::integer[]) with ordinality as t (commit, number)
        group by t.commit
    ) commits
)

-- name: removal
-- Part of an update: removes the references that valid requests take, by their places, and logs them. One that
-- was changed just before it was locked is elsewhere in this snapshot: the final select tells.
taken as materialized (
    select place from locked where (select ok from verdict)[number]
), removed as (
    delete from {file_reference} r
    where r.ctid = any(array(select place from taken))
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

-- name: reference_states
-- What is known of some references: their number, whether the file is tracked, the reference is there, its job.
select exists ({is_tracked}) as tracked, r.file_id is not null as found, r.job_id
from unnest(%(partition_ids)s::text[], %(file_ids)s::uuid[]) with ordinality o (partition_id, file_id, number)
left join {file_reference} r on r.partition_id = o.partition_id and r.file_id = o.file_id
order by o.number;

-- name: references
-- All references, by partition and filename.
select {reference_columns} from {file_reference} r where {live} order by partition_id, filename;

-- name: unassigned_references
-- The references that no job holds, by partition and filename.
select {reference_columns} from {file_reference} r where job_id is null and {live} order by partition_id, filename;

-- name: references_in
-- The references of some partitions, by partition and filename.
select {reference_columns}
from {file_reference} r
where partition_id = any(%(partition_ids)s) and {live}
order by partition_id, filename;

-- name: partition_to_filenames
-- The files of every partition that has some.
select partition_id, array_agg(filename order by filename)
from {file_reference} r
where {live}
group by partition_id;

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

-- name: forget_table
-- Forgets the commits and jobs of a table that is being dropped; no foreign keys do it, as each check of
-- theirs would lock the one row of the table that all commits would meet in.
with jobs as (delete from compaction_job where table_id = %(table_id)s)
delete from applied_commit where table_id = %(table_id)s;
