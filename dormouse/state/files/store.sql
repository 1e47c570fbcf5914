-- name: add_files
-- Adds the files and references of those commits of which no file is tracked yet; returns the files that are.
with {sent}, {before}, file as materialized (
    select *
    from unnest(
        %(commits)s::integer[], %(file_ids)s::uuid[], %(filenames)s::text[], %(byte_counts)s::bigint[],
        %(row_counts)s::bigint[], %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(digests)s::uuid[],
        %(referenced)s::boolean[], %(deletions_till)s::bigint[], %(file_contents)s::bytea[]
    ) as t (commit, file_id, filename, byte_count, row_count, min_key, max_key, digest, referenced, came_after, content)
), refused as materialized (
    select o.commit, o.filename from file o where exists ({is_tracked})
), {merged_of_refs}, checks as (
    select generate_series(1, %(count)s::integer) as commit, true as ok
    union all
    select commit, false from refused
    union all
    select t.commit, false
    from merged m, unnest(%(ref_commits)s::integer[], %(ref_partition_ids)s::text[]) as t (commit, partition_id)
    where t.partition_id = m.partition_id
), {verdict_of_commits}, new_file as materialized (
    select *, least(came_after, {deletions_seen}) as deletions_till
    from file
    where (select ok from verdict)[commit]
), tracked as (
    {track}
    on conflict do nothing
    returning f.file_id
), {inlined}, added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data, true
    from unnest(
        %(ref_commits)s::integer[], %(ref_partition_ids)s::text[], %(ref_file_ids)s::uuid[],
        %(ref_filenames)s::text[], %(ref_row_counts)s::bigint[], %(ref_approximate)s::boolean[],
        %(ref_only)s::boolean[]
    ) as t (commit, partition_id, file_id, filename, row_count, count_approximate, only_contains_data)
    where (select ok from verdict)[commit]
    on conflict do nothing
    returning partition_id, file_id
), {counts_added}, {recorded}
select {outcome}, array(select partition_id from merged),
    case when (select count(distinct file_id) from tracked) < (select count(*) from new_file)
        then lost_race('another transaction adds the same file') end,
    (select jsonb_agg(jsonb_build_array(commit, filename) order by commit, filename) from refused) as refused;

-- name: assign
-- Assigns the references of those commits of which none is missing or assigned to jobs. Locks in the order of the keys.
with {sent}, {before}, input as materialized (
    select q.commit, q.partition_id, q.job_id, f.file_id
    from unnest(
        %(commits)s::integer[], %(partition_ids)s::text[], %(job_ids)s::text[], %(firsts)s::integer[],
        %(lasts)s::integer[]
    ) as q (commit, partition_id, job_id, first, last)
    cross join lateral unnest((%(inputs)s::uuid[])[q.first : q.last]) as f (file_id)
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
), checks as (
    select commit, ok from locked
), {verdict_of_commits}, taken as materialized (
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
-- Replaces each job's inputs by its output, for valid requests.
with {sent}, {before}, {replacements}, locked as materialized (
    select q.number, cardinality(q.file_ids) as wanted, l.place
    from request q
    left join lateral (
        select r.ctid as place
        {found}
        for update
    ) l on true
), checks as (
    select number, count(place) = max(wanted) as ok from locked group by number
    union all
    select o.number, false from output o where exists ({is_tracked})
    union all
    {without_deletions}
), {verdict_of_requests}, {applied}, {taken}, {removed}, {logged}, new_file as materialized (
    -- "least" keeps a deletion with a later number from counting as applied
    select file_id, filename, byte_count, row_count, min_key, max_key, digest, true as referenced,
        least(deletions_till, {deletions_seen}) as deletions_till
    from output
    where (select ok from verdict)[number]
), tracked as (
    {track}
    on conflict do nothing
    returning f.file_id
), added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data, false
    from output
    where (select ok from verdict)[number]
    on conflict do nothing
    returning partition_id, file_id
), {counts_changed}, valid as materialized (
    select job_id from request where (select ok from verdict)[number]
), {finished}, {recorded}
select {outcome},
    case when (select count(distinct file_id) from tracked) < (select count(*) from new_file)
        then lost_race('another transaction adds the same file') end,
    case when (select count(*) from removed) < (select count(*) from taken)
        then lost_race('another transaction changed a reference') end;

-- name: replace_whole
-- The same as replace if every request is valid; otherwise raises not_whole or a unique violation, and changes nothing.
-- It is faster, and if serializable has fewer conflicts, since it reads only what it changes.
with {sent}, {replacements}, removed as (
    delete from {file_reference} r
    where r.ctid = any(array(
            select l.place
            from request q
            cross join lateral (
                select r.ctid as place
                {found}
                offset 0
            ) l
        ))
    returning {removed_columns}
), {logged}, new_file as materialized (
    select file_id, filename, byte_count, row_count, min_key, max_key, digest, true as referenced,
        least(deletions_till, {deletions_seen}) as deletions_till
    from output
), tracked as (
    {track}
), added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data, false
    from output
    returning partition_id, file_id
), {counts_changed}, valid as (
    select job_id from request
), {finished}, {ended}, recorded as (
    {record}
    order by commit_key
)
select case when (select count(*) from removed) < cardinality(%(inputs)s::uuid[])
        -- a reference that was changed just before may belong to another job now
        or exists (
            select from of_job where ((partition_id, job_id) in (select partition_id, job_id from request)) is not true
        )
        or (select count(*) from ended where ok) < cardinality(%(attempt_ids)s::uuid[])
        or exists (select from request where deletions_till is null) and {deletions_pending} > 0
        or {renamed}
    then not_whole() end;

-- name: add_whole
-- The same as add_files if no file is tracked yet, but faster; otherwise raises not_whole or a unique violation, and changes
-- nothing.
with {sent}, new_file as materialized (
    -- "least" ignores nulls
    select *, least(came_after, {deletions_seen}) as deletions_till
    from unnest(
        %(file_ids)s::uuid[], %(filenames)s::text[], %(byte_counts)s::bigint[], %(row_counts)s::bigint[],
        %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(digests)s::uuid[], %(referenced)s::boolean[],
        %(deletions_till)s::bigint[], %(file_contents)s::bytea[]
    ) as t (file_id, filename, byte_count, row_count, min_key, max_key, digest, referenced, came_after, content)
), tracked as (
    {track}
), {inlined}, added as (
    {into_references}
    select %(table_id)s, *, true
    from unnest(
        %(ref_partition_ids)s::text[], %(ref_file_ids)s::uuid[], %(ref_filenames)s::text[],
        %(ref_row_counts)s::bigint[], %(ref_approximate)s::boolean[], %(ref_only)s::boolean[]
    )
    returning partition_id, file_id
), {counts_added}, {ended}, {merged_of_refs}, recorded as (
    {record}
    order by commit_key
)
select case when (select count(*) from ended where ok) < cardinality(%(attempt_ids)s::uuid[]) or {renamed}
        or exists (select from merged) or {reshaped}
    then not_whole() end;

-- name: split
-- Replaces unassigned references by others to the same files, for valid requests.
with {sent}, {before}, input as materialized (
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
), {merged_of_targets}, locked as materialized (
    select i.number, l.place, l.place is not null as ok
    from input i
    left join lateral (
        select r.ctid as place
        from {file_reference} r
        where r.partition_id = i.partition_id and r.file_id = i.file_id and r.job_id is null
        for update
    ) l on true
), checks as (
    select number, ok from locked
    union all
    select t.number, false from merged m, target t where t.partition_id = m.partition_id
    union all
    select t.number, false
    from target t
    where exists (
        select from {file_reference} r
        where r.partition_id = t.partition_id and r.file_id = t.file_id
        offset 0
    )
), {verdict_of_requests}, {applied}, {taken}, {removed}, {logged}, added as (
    {into_references}
    select %(table_id)s, partition_id, file_id, filename, row_count, count_approximate, only_contains_data, false
    from target
    where (select ok from verdict)[number]
    on conflict do nothing
    returning partition_id, file_id
), {counts_changed}, {recorded}
select {outcome}, array(select partition_id from merged),
    case when (select count(*) from added) < (select count(*) from target where (select ok from verdict)[number])
        then lost_race('another transaction adds the same reference') end,
    case when (select count(*) from removed) < (select count(*) from taken)
        then lost_race('another transaction changed a reference') end;

-- name: forget
-- Deletes the records of unreferenced files, for commits of which every file is tracked and unreferenced; returns the files
-- that are not.
with {sent}, {before}, input as materialized (
    select *
    from unnest(%(commits)s::integer[], %(file_ids)s::uuid[], %(filenames)s::text[]) as t (commit, file_id, filename)
    order by file_id
), locked as materialized (
    select i.*, l.place, l.place is not null as tracked
    from input i
    left join lateral (
        {lock_file}
    ) l on true
), refused as materialized (
    select commit, filename, tracked
    from locked
    where not tracked
        or exists (select from {file_reference} r
            where uuid_hash(r.file_id) = uuid_hash(locked.file_id) and r.file_id = locked.file_id and {live}
            offset 0)
), checks as (
    select commit, true as ok from input
    union all
    select commit, false from refused
), {verdict_of_commits}, gone as materialized (
    select file_id, place from locked where (select ok from verdict)[commit]
), forgotten as (
    {forget_files}
), contents_gone as (
    delete from {file_content} c where c.file_id = any(array(select file_id from gone))
), {recorded}
select {outcome},
    case when (select count(distinct file_id) from forgotten) < (select count(distinct file_id) from gone)
        then lost_race('another transaction changed a file') end,
    (select jsonb_agg(jsonb_build_array(commit, filename, tracked) order by commit, filename) from refused) as refused;

-- name: remember_refused
-- Records the refused items of commits that are applied in part, in the transaction that applies them.
update applied_commit c
set refused = r.refused::jsonb
from unnest(%(commit_keys)s::uuid[], %(refused)s::text[]) as r (commit_key, refused)
where c.table_id = %(table_id)s and c.commit_key = r.commit_key;

-- name: unassign_job
-- Releases every reference that a job holds, and deletes the job. With a partition, reads only the references there; without
-- one, those of all partitions, as a job that replaced a part of its inputs no longer has a row that names the partition.
with job as (
    delete from compaction_job
    where table_id = %(table_id)s and job_id = %(job_id)s
        and (%(partition_id)s::text is null or partition_id = %(partition_id)s)
), held as materialized (
    select r.partition_id, r.file_id
    from {file_reference} r
    where r.partition_id = %(partition_id)s and r.job_id = %(job_id)s
    union all
    select r.partition_id, r.file_id
    from {file_reference} r
    where %(partition_id)s::text is null and r.job_id = %(job_id)s
), locked as materialized (
    select l.place
    from (select * from held order by partition_id, file_id) h
    cross join lateral (
        select r.ctid as place
        from {file_reference} r
        where r.partition_id = h.partition_id and r.file_id = h.file_id and r.job_id = %(job_id)s
        for update
    ) l
), {freed}, {mark_freed}
select {freed_whole};

-- name: applied_source
-- The digest of an applied commit's data, null if none was recorded; no row if the commit is not applied.
select source from applied_commit where table_id = %(table_id)s and commit_key = %(commit_key)s;

-- name: forget_expired_commits
-- Deletes the ids of expired commits, a limited number at a time; returns how many.
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

-- name: keep_writers_out
-- Locks out transactions that change references, after waiting for those that run; readers go on. A reference added in the
-- middle of a clear would refer to a deleted file, and a deletion must come before or after each added reference.
lock table {file_reference} in share row exclusive mode;

-- name: wait_for_deletions
-- Waits for keep_writers_out, as statements that add references do. A serializable transaction takes its snapshot with its
-- first statement; locking a table takes none, so the snapshot comes after the wait.
lock table {file_reference} in row exclusive mode;

-- name: clear
-- Deletes every file, reference, job, deletion and report of the table, and the differences found; invalidates its totals.
with references_gone as (delete from {file_reference}),
jobs_gone as (delete from compaction_job where table_id = %(table_id)s),
log_gone as (delete from removal where table_id = %(table_id)s),
history_gone as (
    update tables
    set history_since = clock_timestamp(), log_since = clock_timestamp(), log_dropped_xid = pg_current_xact_id(),
        log_dropped_by = pg_current_xact_id()
    where table_id = %(table_id)s
),
looks_gone as (delete from watermark where table_id = %(table_id)s and purpose <> 'totals'),
totals_void as (
    -- not deleted, so that a count that is running now does not record its totals either
    insert into watermark as w (table_id, purpose)
    values (%(table_id)s, 'totals')
    on conflict (table_id, purpose) do update set whole_at = null, version = w.version + 1
),
deletions_gone as (delete from deletion where table_id = %(table_id)s),
listed_gone as (delete from deletion_content where table_id = %(table_id)s),
differences_gone as (delete from difference where table_id = %(table_id)s),
rounds_gone as (delete from last_round where table_id = %(table_id)s),
contents_gone as (delete from {file_content})
{forget_all};

-- name: is_unused
-- Whether the table never had rows; runs under a lock that keeps other transactions out. Waits for a change of a row table.
with edited as materialized (
    select version from row_table where table_id = %(table_id)s for update
)
select not exists ({file_facts})
    and not exists (select from applied_commit where table_id = %(table_id)s and expires_at is null)
    and not exists (select from applied_commit where table_id = %(table_id)s and expires_at is not null)
    and not exists (select from edited where version > 0);

-- name: forget_table
-- Deletes the commit ids and jobs of a table that is being dropped. Foreign keys do not do this, since their checks would
-- make all commits lock the same row of the table.
with jobs as (delete from compaction_job where table_id = %(table_id)s),
marks as (delete from dirty_partition where table_id = %(table_id)s),
expiring as (delete from applied_commit where table_id = %(table_id)s and expires_at is not null)
delete from applied_commit where table_id = %(table_id)s and expires_at is null;
