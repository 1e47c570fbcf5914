-- name: sent
-- Part of an update: the commits that have an id, by number.
sent as materialized (
    select *
    from unnest(
        %(sent)s::integer[], %(commit_keys)s::uuid[], %(commit_ids)s::text[], %(contents)s::uuid[],
        %(sources)s::uuid[], %(expire)s::boolean[]
    ) as t (commit, commit_key, commit_id, content, source, expires)
)

-- name: inlined
-- Part of an update: stores the bytes of the inlined files of new_file.
inlined as (
    insert into {file_content} (table_id, file_id, content)
    select %(table_id)s, file_id, content from new_file where content is not null
    on conflict do nothing
)

-- name: before
-- Part of an update: the commits that were applied before.
before as materialized (
    select s.commit, coalesce(s.content = b.content, true) as same, b.refused
    from sent s
    cross join lateral (
        select a.content, a.refused
        from applied_commit a
        where a.table_id = %(table_id)s and a.commit_key = s.commit_key
        offset 0  -- keeps this a look-up for each commit
    ) b
)

-- name: merged
-- Part of an update: those partitions that get references but left the tree in a merge; once some merged partitions were
-- forgotten, also partitions that do not exist. Most tables have none.
merged as materialized (
    select n.partition_id
    from (
        select distinct unnest({named}) as partition_id
        where exists (select from partition where table_id = %(table_id)s and merged_epoch is not null offset 0)
            or exists (select from truncation where table_id = %(table_id)s and forgotten_epoch > 0 offset 0)
    ) n
    left join lateral (
        select p.merged_epoch is null as in_tree
        from partition p
        where p.table_id = %(table_id)s and p.partition_id = n.partition_id collate "C"
        offset 0
    ) p on true
    where coalesce(
        not p.in_tree, exists (select from truncation where table_id = %(table_id)s and forgotten_epoch > 0 offset 0)
    )
)

-- name: named_by_refs
-- Part of an update: the partitions of the references that come with files.
%(ref_partition_ids)s::text[]

-- name: named_by_targets
-- Part of an update: the partitions of the references that replace others.
array(select partition_id from target)

-- name: verdict_of_commits
-- Part of an update: for each commit, whether all of its checks succeeded, and no commit of the batch was applied before.
verdict as materialized (
    select array_agg(ok order by commit) as ok
    from (
        select commit, bool_and(ok) and not exists (select from before) as ok from checks group by commit
    ) commits
), applied as (
    select ok from verdict
)

-- name: verdict_of_requests
-- Part of an update: the same for each request, since requests succeed one by one.
verdict as materialized (
    select array_agg(ok order by number) as ok
    from (
        select number, bool_and(ok) and not exists (select from before) as ok from checks group by number
    ) requests
)

-- name: recorded
-- Part of an update: records the applied commits, except those that another transaction has recorded meanwhile.
recorded as (
    {record}
    where (select ok from applied)[commit]
    order by commit_key
    on conflict do nothing
    returning commit_key
)

-- name: record
-- Part of an update: records commits.
insert into applied_commit (table_id, commit_key, commit_id, content, source, expires_at)
select %(table_id)s, commit_key, commit_id, content, source,
    case when expires then clock_timestamp() + make_interval(secs => %(kept_seconds)s::float8) end
from sent

-- name: outcome
-- Part of an update: the outcome of each unit and commit. Nothing is applied when any commit was applied before.
(select ok from verdict) as applied,
array(select commit from before where same) as before,
array(select commit from before where not same) as reused,
(select jsonb_object_agg(commit, refused) from before where refused is not null) as refused_before,
case when (select count(*) from recorded) < (select count(*) from sent where (select ok from applied)[commit])
    then lost_race('another transaction applies the same commit') end

-- name: replacements
-- Part of an update: the requests to replace references, with the ids of their inputs, and their outputs. Requests come
-- in the order of their partitions, and inputs in the order of their ids, so that all transactions lock in one order.
request as materialized (
    select number, partition_id, job_id, (%(inputs)s::uuid[])[first : last] as file_ids, deletions_till
    from unnest(
        %(partition_ids)s::text[], %(job_ids)s::text[], %(firsts)s::integer[], %(lasts)s::integer[],
        %(deletions_till)s::bigint[]
    ) with ordinality as t (partition_id, job_id, first, last, deletions_till, number)
), output as materialized (
    select *
    from unnest(
        %(out_requests)s::integer[], %(out_partition_ids)s::text[], %(out_file_ids)s::uuid[],
        %(out_filenames)s::text[], %(out_row_counts)s::bigint[], %(out_approximate)s::boolean[],
        %(out_only)s::boolean[], %(out_byte_counts)s::bigint[], %(out_min_keys)s::bytea[],
        %(out_max_keys)s::bytea[], %(out_digests)s::uuid[], %(out_deletions_till)s::bigint[]
    ) as t (number, partition_id, file_id, filename, row_count, count_approximate, only_contains_data,
            byte_count, min_key, max_key, digest, deletions_till)
)

-- name: deletions_seen
-- Part of an update: the number of the last deletion; files that the update adds come after it.
(select coalesce(max(deletion_id), 0) from deletion where table_id = %(table_id)s)

-- name: deletions_pending
-- Part of an update: the number of the last deletion that readers apply.
(select coalesce(max(deletion_id), 0) from deletion where table_id = %(table_id)s and retired_xid is null)

-- name: may_meet
-- Part of a query: whether a deletion d may match rows within some bounds, judged by their first three row keys.
((%(max_keys)s::bytea[])[1] < d.min_keys[1]) is not true and (d.max_keys[1] < (%(min_keys)s::bytea[])[1]) is not true
and ((%(max_keys)s::bytea[])[2] < d.min_keys[2]) is not true and (d.max_keys[2] < (%(min_keys)s::bytea[])[2]) is not true
and ((%(max_keys)s::bytea[])[3] < d.min_keys[3]) is not true and (d.max_keys[3] < (%(min_keys)s::bytea[])[3]) is not true

-- name: without_deletions
-- Part of an update: requests that missed a pending deletion of their inputs, so that their output may have its rows.
select q.number, false
from request q
where q.deletions_till is null and {deletions_pending} > 0 and exists (
        select from unnest(q.file_ids) as i (file_id)
        cross join lateral (select f.* from ({file_facts}) f where f.file_id = i.file_id offset 0) f
        where {has_pending}
    )

-- name: has_pending
-- Part of a query: whether a file f may have rows of a pending deletion, judged by the deletions' numbers.
(
    f.deletions_till < {deletions_pending}
    or exists (
        select from deletion d
        where d.table_id = %(table_id)s and d.deletion_id = any(f.deletions_left) and d.retired_xid is null
    )
)

-- name: deletions_listed
-- Part of a query: the deletions d as JSON, each with its number, its condition, and whether it is an erasure.
json_agg(json_build_array(d.deletion_id, d.condition, exists (
    select from erasure e where e.table_id = d.table_id and e.deletion_id = d.deletion_id
)))

-- name: digest_of_references
-- Part of a query: a digest of the references r, which does not depend on their order.
coalesce(bit_xor(uuid_hash_extended(r.file_id, hashtextextended(r.partition_id, 0))), 0)

-- name: may_be_of
-- Part of a query: whether a pending deletion d must be applied to a file f, and may match its rows, judged by the keys.
(d.deletion_id > f.deletions_till or d.deletion_id = any(f.deletions_left)) and (f.max_key < d.min_key) is not true
and (substring(f.min_key for length(d.max_key)) > d.max_key) is not true

-- name: found
-- Part of an update: a request's inputs, found with one walk through the index.
from {file_reference} r
where r.partition_id = q.partition_id and r.file_id = any(q.file_ids) and r.job_id = q.job_id

-- name: found_one_by_one
-- The same as found, for older servers: they look up the elements of an array one by one, or read the whole partition if
-- statistics say that it has one file.
from unnest(q.file_ids) as i (file_id)
cross join lateral (
    select s.ctid
    from {file_reference} s
    where s.partition_id = q.partition_id and s.file_id = i.file_id and s.job_id = q.job_id
    offset 0
) as r

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

-- name: taken
-- Part of an update: the places (ctid) of the references that valid requests take.
taken as materialized (
    select place from locked where place is not null and (select ok from verdict)[number]
)

-- name: removed
-- Part of an update: removes the references that are taken. One that was changed just before it was locked has another
-- place in this snapshot, and is not removed: the statement must compare the numbers.
removed as (
    delete from {file_reference} r
    where r.ctid = any(array(select place from taken))
    returning {removed_columns}
)

-- name: finished
-- Part of an update: deletes the jobs of valid requests, even a job that was just leased again.
finished as (
    delete from compaction_job
    where job_id = any(array(select job_id from valid))
        -- "+ 0" keeps this from an index condition: with one, all jobs of the table are read if statistics say they are few
        and table_id + 0 = %(table_id)s
)

-- name: ended
-- Part of an update: ends write attempts that were not abandoned. Older servers find an attempt by its place even when it
-- was abandoned just before: ok is then false.
ended as (
    delete from write_attempt
    where ctid = any(array(
        select l.place
        from unnest(%(attempt_ids)s::uuid[]) as i (attempt_id)
        cross join lateral (
            select a.ctid as place
            from write_attempt a
            where a.table_id = %(table_id)s and a.attempt_id = i.attempt_id
                and a.abandoned_at is null and a.finished_at is null
            offset 0
        ) l
    ))
    returning abandoned_at is null and finished_at is null as ok
)

-- name: renamed
-- Part of an update: whether the table has another name than one that the senders gave, if they gave any.
exists (
    select from unnest(%(names)s::text[]) as known (name)
    where known.name is distinct from (select t.name from tables t where t.table_id = %(table_id)s)
)

-- name: reshaped
-- Part of an update: whether the columns of the table have another version than that of the new files, if it was given.
%(schema_version)s::integer <> (select t.schema_version from tables t where t.table_id = %(table_id)s)

-- name: freed
-- Part of an update: releases the locked references, found by their places (ctid).
freed as (
    update {file_reference} r
    set job_id = null, last_updated = clock_timestamp()
    where r.ctid = any(array(select place from locked))
    returning r.partition_id
)

-- name: freed_whole
-- Part of an update: how many references were released. Fails if one was changed just before it was locked, as its place
-- is then another.
(select count(*) from freed) + case when (select count(*) from freed) < (select count(*) from locked)
    then lost_race('another transaction changed a reference')::integer else 0 end

-- name: removed_columns
-- Part of an update: the columns of a reference r that the log keeps, and its job.
r.partition_id, r.job_id, r.file_id, r.row_count, r.count_approximate, r.only_contains_data_for_this_partition,
r.added_xid, r.ingested

-- name: logged
-- Part of an update: logs the removed references, one row for each job and partition.
of_job as materialized (
    select partition_id, job_id, array_agg(file_id) as file_ids, array_agg(row_count) as row_counts,
        array_agg(count_approximate) as counts_approximate,
        array_agg(only_contains_data_for_this_partition) as only_contain_data_for_this_partition,
        array_agg(added_xid) as added_xids, array_agg(ingested) as ingested
    from removed
    group by partition_id, job_id
), logged as (
    insert into removal (
        table_id, partition_id, file_ids, row_counts, counts_approximate, only_contain_data_for_this_partition,
        added_xids, ingested
    )
    select %(table_id)s, partition_id, file_ids, row_counts, counts_approximate,
        only_contain_data_for_this_partition, added_xids, ingested
    from of_job
)

-- name: alone
-- Part of garbage collection: locks out other collectors and the recording of cuts until the files are stamped.
state as materialized (
    -- not "for update": commits with an id lock the row's key in share mode, and must not wait
    select collected_till from tables where table_id = %(table_id)s for no key update
)

-- name: stamp
-- Part of garbage collection: the current time, but not before the last cut, even if the clock was set back: the cut needs
-- files that are stamped after it.
greatest(clock_timestamp(), (select max(recorded_at) from cut where table_id = %(table_id)s))

-- name: gone
-- Part of garbage collection: the files of references that were removed since the last run.
gone as (
    select distinct unnest(g.file_ids) as file_id
    from state s
    cross join lateral (
        select file_ids
        from removal
        where table_id = %(table_id)s
            and removed_xid >= pg_snapshot_xmin(s.collected_till)
            and not pg_visible_in_snapshot(removed_xid, s.collected_till)
        offset 0
    ) g
)

-- name: is_logged
-- Part of a query: whether the log of removals has all removals from a table t since a snapshot. Dropped days of the log are
-- not missing if they were dropped before the snapshot, or if the snapshot saw all their removals.
(
    pg_visible_in_snapshot(t.log_dropped_by, %(snapshot)s::pg_snapshot)
    or t.log_dropped_xid < pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
) is not false

-- name: gone_since
-- Part of a query: the files r of references that were removed since the last garbage collection.
select r.file_id
from tables t
cross join lateral (
    select unnest(file_ids) as file_id
    from removal
    where table_id = %(table_id)s
        and removed_xid >= pg_snapshot_xmin(t.collected_till)
        and not pg_visible_in_snapshot(removed_xid, t.collected_till)
) r
where t.table_id = %(table_id)s

-- name: into_references
-- Part of an update: the table and columns of new references.
insert into {file_reference} (
    table_id, partition_id, file_id, filename, row_count, count_approximate, only_contains_data_for_this_partition,
    ingested
)
