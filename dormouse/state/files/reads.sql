-- name: referenced_files
-- Every referenced file with its facts and references, sorted by filename and partition.
select f.filename as f_filename, f.byte_count, f.row_count as f_row_count, f.min_key, f.max_key,
    f.added_at, uuid_send(f.digest), {reference_columns}
from {file_reference} r
-- "offset 0" forces a look-up by key, whatever the statistics say. A left join, as a snapshot from before a conversion has
-- the references without the facts, which the caller must notice
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where {live}
order by f.filename, r.partition_id;

-- name: files_in
-- The files of some partitions with their facts and their references there, sorted by filename and partition.
select f.filename as f_filename, f.byte_count, f.row_count as f_row_count, f.min_key, f.max_key,
    f.added_at, uuid_send(f.digest), {reference_columns}
from {file_reference} r
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where r.partition_id = any(%(partition_ids)s) and {live}
order by f.filename, r.partition_id;

-- name: plan_head
-- Part of a query: the columns of the first row of a plan.
t.epoch,
    (case when pg_is_in_recovery() then replayed_snapshot(t.table_id) else pg_current_snapshot() end)::text as snapshot, (
        select {deletions_listed}
        from deletion d
        where d.table_id = %(table_id)s and d.retired_xid is null and {may_meet}
    ) as deletions, null as partition_id, null as filename,
    jsonb_build_array(
        t.properties -> 'aggregate', t.properties -> 'filter', t.properties -> 'newest_by', t.properties -> 'verify_reads'
    ) = %(shown_by)s::jsonb and t.name = %(name)s as only_contains_data,
    (extract(epoch from e.created_at) * 1000000)::bigint as byte_count, null::bytea as min_key,
    null::bytea as max_key, t.schema_version::bigint as deletions_till, null::bigint[] as deletions_left,
    null::bigint as row_count, true as is_known

-- name: plan
-- The facts from which a query is planned, in one snapshot. The first row has the table's epoch, the snapshot, the pending
-- deletions that may match some keys, whether the name and the properties that readers apply are those known to the caller
-- (as only_contains_data), the time of the epoch in microseconds since 1970 (as byte_count), and the version of the schema
-- (as deletions_till). The other rows have the references of some partitions, with the facts of their files.
select {plan_head}
from tables t
left join epoch e on e.table_id = t.table_id and e.epoch = t.epoch
where t.table_id = %(table_id)s
union all
select null, null, null, r.partition_id, r.filename, r.only_contains_data_for_this_partition, f.byte_count, f.min_key,
    f.max_key, f.deletions_till, f.deletions_left, f.row_count, f.file_id is not null
from {file_reference} r
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where r.partition_id = any(%(partition_ids)s) and {live};

-- name: plan_since
-- The same as plan, with two more columns, for a caller that may remember the references of an earlier plan of these
-- partitions, made in the snapshot known_till. The state of a plan is the number of its references and a digest of them. The
-- first row has the present state (as filename), and whether the references that known_till saw still have the known state
-- (as is_same). If so, those that were added since follow, marked by is_same; if there are deletions, also those of the known
-- files near_ids, or all if near_ids is null. Otherwise all follow. Further rows have the names and contents of inlined files,
-- up to a number of bytes: the wanted ones, and those added since that may have keys within the bounds.
with head as materialized (
    select {plan_head}
    from tables t
    left join epoch e on e.table_id = t.table_id and e.epoch = t.epoch
    where t.table_id = %(table_id)s
), added as materialized (
    select r.partition_id, r.file_id, r.filename, r.only_contains_data_for_this_partition
    from {file_reference} r
    where r.partition_id = any(%(partition_ids)s) and {live}
        -- not found by added_xid: other partitions may have got many references since
        and r.added_xid >= pg_snapshot_xmin(%(known_till)s::pg_snapshot)
        and not pg_visible_in_snapshot(r.added_xid, %(known_till)s::pg_snapshot)
), state as materialized (
    select s.present, s.is_same, s.is_same and (s.is_plain or %(near_ids)s::uuid[] is not null) as is_added_to,
        s.is_same and not s.is_plain as is_near
    from (
        select concat(present.files, ' ', present.digest) as present,
            coalesce(concat(present.files - new.files, ' ', present.digest # new.digest) = %(known_state)s, false) as is_same,
            (select h.deletions from head h) is null as is_plain
        from (
            select count(*) as files, {digest_of_references} as digest
            from {file_reference} r
            where r.partition_id = any(%(partition_ids)s) and {live}
        ) present, (
            select count(*) as files, {digest_of_references} as digest from added r
        ) new
    ) s
), ref as materialized (
    select r.partition_id, r.filename, r.only_contains_data_for_this_partition, f.byte_count, f.min_key, f.max_key,
        f.deletions_till, f.deletions_left, f.row_count, f.file_id is not null as is_known, r.file_id, r.is_added
    from (
        select a.*, true as is_added from added a where (select s.is_added_to from state s)
        union all
        select r.partition_id, r.file_id, r.filename, r.only_contains_data_for_this_partition, false
        from unnest(%(near_ids)s::uuid[]) n (file_id)
        cross join lateral (
            select r.* from {file_reference} r where r.partition_id = any(%(partition_ids)s) and r.file_id = n.file_id offset 0
        ) r
        where (select s.is_near from state s) and {live}
            and pg_visible_in_snapshot(r.added_xid, %(known_till)s::pg_snapshot)
        union all
        select r.partition_id, r.file_id, r.filename, r.only_contains_data_for_this_partition,
            pg_visible_in_snapshot(r.added_xid, %(known_till)s::pg_snapshot) is not true
        from {file_reference} r
        where r.partition_id = any(%(partition_ids)s) and {live} and not (select s.is_added_to from state s)
    ) r
    left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
), content as (
    select w.filename, c.content, sum(octet_length(c.content)) over (order by w.file_id) as till
    from (
        select file_id, filename
        from ref
        where is_added and starts_with(filename, %(inlined)s) and (max_key < %(lowest)s::bytea) is not true
            and (substring(min_key for length(%(highest)s::bytea)) > %(highest)s::bytea) is not true
        union
        select * from unnest(%(wanted_ids)s::uuid[], %(wanted)s::text[]) as t (file_id, filename)
    ) w
    cross join lateral (select c.* from {file_content} c where c.file_id = w.file_id offset 0) c
)
select h.epoch, h.snapshot, h.deletions, h.partition_id, s.present, h.only_contains_data, h.byte_count, h.min_key,
    h.max_key, h.deletions_till, h.deletions_left, h.row_count, h.is_known, null::bytea as content, s.is_same
from head h, state s
union all
select null, null, null, partition_id, filename, only_contains_data_for_this_partition, byte_count, min_key, max_key,
    deletions_till, deletions_left, row_count, is_known, null, is_added
from ref
union all
select null, null, null, null, filename, null, null, null, null, null, null, null, true, content, null
from content
where till <= %(bytes_max)s;

-- name: lost_file
-- A file that some partitions refer to and whose row is lost, if the table still has the layout of the snapshot.
select r.filename, r.partition_id
from {file_reference} r
where r.partition_id = any(%(partition_ids)s) and {live}
    and not exists (select from ({file_facts}) f where f.file_id = r.file_id offset 0)
    and exists (select from tables t where t.table_id = %(table_id)s and t.layout = %(layout)s)
limit 1;

-- name: count_files
-- The number of files in the first references of some partitions.
select count(distinct file_id)
from (
    select r.file_id from {file_reference} r where r.partition_id = any(%(partition_ids)s) and {live} limit %(limit)s
) first;

-- name: plan_at
-- The references of some partitions in a snapshot: the current ones that it saw, and those that were removed since. A
-- collected file is no longer known: its id stands for its name. The first row has the deletions of the snapshot; whether
-- what the caller remembers of a cut still holds (as only_contains_data): the cut exists and can be read, and the columns
-- and properties of the table are the same; the time from which the log and the files are complete, in microseconds since
-- 1970 (as byte_count); and whether the log has all removals since the snapshot (as is_known).
select (
        select {deletions_listed}
        from deletion d
        where d.table_id = %(table_id)s and pg_visible_in_snapshot(d.added_xid, %(snapshot)s::pg_snapshot)
            and pg_visible_in_snapshot(d.retired_xid, %(snapshot)s::pg_snapshot) is not true and {may_meet}
    ) as deletions, null as partition_id, null as filename,
    t.schema_version = %(version)s and t.properties = %(properties)s::jsonb and exists (
        select from cut c
        where c.table_id = t.table_id and c.cut_id = %(cut_id)s and c.snapshot::text = %(snapshot)s::pg_snapshot::text
            and c.recorded_at >= greatest(
                t.history_since, (select u.recorded_at from truncation u where u.table_id = t.table_id)
            )
        offset 0
    ) as only_contains_data,
    (extract(epoch from t.history_since) * 1000000)::bigint as byte_count, null::bytea as min_key, null::bytea as max_key,
    null::bigint as deletions_till, null::bigint[] as deletions_left, null::bigint as row_count, {is_logged} as is_known
from tables t
where t.table_id = %(table_id)s
union all
select null, r.partition_id, r.filename, r.only_contains_data_for_this_partition, f.byte_count, f.min_key, f.max_key,
    f.deletions_till, f.deletions_left, f.row_count, f.file_id is not null
from {file_reference} r
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where r.partition_id = any(%(partition_ids)s) and {live}
    and pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
union all
select null, g.partition_id, coalesce(f.filename, r.file_id::text), r.only_contains_data_for_this_partition,
    f.byte_count, f.min_key, f.max_key, f.deletions_till, f.deletions_left, f.row_count, f.file_id is not null
from removal g
cross join lateral unnest(g.file_ids, g.only_contain_data_for_this_partition, g.added_xids)
    as r (file_id, only_contains_data_for_this_partition, added_xid)
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
    and not pg_visible_in_snapshot(g.removed_xid, %(snapshot)s::pg_snapshot)
    and pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
    and g.partition_id = any(%(partition_ids)s);

-- name: has_same_rows
-- Whether some partitions certainly have the rows of a snapshot: since then nothing was ingested or restored, and every
-- removed reference was moved to another partition, or replaced in the same transaction by as many rows of its partition.
-- Where row counts are estimated, or compaction changes them, any number of rows may replace others. The second column has
-- the deletions since the snapshot that may match some keys, or that a restore undid since.
with change as materialized (
    select r.added_xid as xid, r.partition_id, r.file_id, 1 as sign, r.row_count, r.count_approximate, r.ingested
    from {file_reference} r
    where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
        and not pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot)
    union all
    select e.xid, g.partition_id, r.file_id, e.sign, r.row_count, r.count_approximate, r.ingested
    from removal g
    cross join lateral unnest(g.file_ids, g.row_counts, g.counts_approximate, g.added_xids, g.ingested)
        as r (file_id, row_count, count_approximate, added_xid, ingested)
    cross join lateral (values (r.added_xid, 1), (g.removed_xid, -1)) as e (xid, sign)
    where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
        and not pg_visible_in_snapshot(e.xid, %(snapshot)s::pg_snapshot)
), concerned as (
    select unnest(%(partition_ids)s::text[]) as partition_id
    union all
    -- the rows of partitions that were merged since are in the leaf that took their place
    select p.partition_id
    from partition p
    join epoch e on e.table_id = p.table_id and e.epoch = p.merged_epoch
    where p.table_id = %(table_id)s and not pg_visible_in_snapshot(e.added_xid, %(snapshot)s::pg_snapshot)
), replaced as (
    select not bool_or(sign > 0 and ingested and (row_count > 0 or count_approximate))
        and (
            sum(sign * row_count) = 0 and not bool_or(count_approximate)
            or bool_or(sign < 0) and (
                bool_or(count_approximate) or %(is_transformed)s
                or exists (select from deletion where table_id = %(table_id)s)
            )
        ) as is_same
    from (
        select *, min(sign) over moved < max(sign) over moved as is_moved
        from change
        window moved as (partition by xid, file_id)
    ) c
    where not is_moved and partition_id in (select partition_id from concerned)
    group by xid, partition_id
)
select coalesce(bool_and(is_same), true) and exists (select from tables t where t.table_id = %(table_id)s and {is_logged})
    and not exists (
        select from restored
        where table_id = %(table_id)s and not pg_visible_in_snapshot(restored_xid, %(snapshot)s::pg_snapshot)
    ), (
        select json_agg(json_build_array(d.deletion_id, d.condition))
        from deletion d
        where d.table_id = %(table_id)s and {may_meet} and (
                not pg_visible_in_snapshot(d.added_xid, %(snapshot)s::pg_snapshot)
                or d.retired_xid in (select restored_xid from restored where table_id = %(table_id)s)
                    and not pg_visible_in_snapshot(d.retired_xid, %(snapshot)s::pg_snapshot)
            )
    )
from replaced;

-- name: deletions_of
-- The deletions that a job needs before it reads some files: the last number, and the pending ones that may match their
-- rows; and for each file, the number up to which deletions are done, its smallest and largest key, and those still left.
with input as materialized (
    select i.number, f.deletions_till, f.min_key, f.max_key, f.deletions_left
    from unnest(%(file_ids)s::uuid[]) with ordinality as i (file_id, number)
    left join lateral (
        select f.* from ({file_facts}) f where f.file_id = i.file_id offset 0
    ) f on true
)
select {deletions_seen}, (
        select {deletions_listed}
        from deletion d
        where d.table_id = %(table_id)s and (d.retired_xid is null or %(retired_too)s)
            and (
                d.deletion_id > (select min(deletions_till) from input)
                or d.deletion_id in (select unnest(deletions_left) from input)
            ) and exists (select from input f where {may_be_of})
    ), array(select deletions_till from input order by number), array(select min_key from input order by number),
    array(select max_key from input order by number), (select json_agg(deletions_left order by number) from input);

-- name: unreferenced_files
-- The first unreferenced files by name.
select f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.unreferenced_at, uuid_send(f.digest)
from ({file_facts}) f
where not exists (
    select from {file_reference} r
    where uuid_hash(r.file_id) = uuid_hash(f.file_id) and r.file_id = f.file_id and {live}
    offset 0
)
order by f.filename
limit %(limit)s;

-- name: has_files
-- Whether any file is tracked.
select exists ({file_facts});

-- name: several_files
-- Whether any partition has more than one file.
select exists (select from {file_reference} r where {live} group by r.partition_id having count(*) > 1);

-- name: reference_columns
-- Part of a query: the columns of a reference r.
r.filename, r.partition_id, r.row_count, r.job_id, r.last_updated, r.count_approximate,
r.only_contains_data_for_this_partition

-- name: tracked
-- Those of some files that the table tracks.
select o.file_id from unnest(%(file_ids)s::uuid[]) as o (file_id) where exists ({is_tracked});

-- name: reference_states
-- The states of some references: whether the file is tracked, whether the reference exists, its job, and whether a pending
-- deletion applies to the file.
select exists ({is_tracked}) as tracked, r.file_id is not null as found, r.job_id, {deletions_pending} > 0 and exists (
        select from ({file_facts}) f where f.file_id = o.file_id and {has_pending} offset 0
    ) as is_deleted_from
from unnest(%(partition_ids)s::text[], %(file_ids)s::uuid[]) with ordinality o (partition_id, file_id, number)
left join lateral (
    select r.file_id, r.job_id
    from {file_reference} r
    where r.partition_id = o.partition_id and r.file_id = o.file_id
    offset 0
) r on true
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

-- name: digests
-- The digests of some files; null for a file without one.
select f.filename, uuid_send(f.digest)
from unnest(%(file_ids)s::uuid[]) as w (file_id)
cross join lateral (select f.* from ({file_facts}) f where f.file_id = w.file_id offset 0) f;

-- name: file_page
-- A page of the files after one with their facts, sorted by id, which is a hash of the name.
select f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.added_at, f.unreferenced_at, uuid_send(f.digest)
from ({file_facts}) f
where f.file_id > %(after)s
order by f.file_id
limit %(limit)s;

-- name: gone_since_snapshot
-- The references that a snapshot had and that were removed since, and whether their files are still known.
select f.filename, g.partition_id, r.row_count, null::text as job_id, null::timestamptz as last_updated,
    r.count_approximate, r.only_contains_data_for_this_partition
from removal g
cross join lateral unnest(
    g.file_ids, g.row_counts, g.counts_approximate, g.only_contain_data_for_this_partition, g.added_xids
) as r (file_id, row_count, count_approximate, only_contains_data_for_this_partition, added_xid)
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where g.table_id = %(table_id)s and g.removed_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
    and not pg_visible_in_snapshot(g.removed_xid, %(snapshot)s::pg_snapshot)
    and pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot);

-- name: come_since_snapshot
-- The number of references added since a snapshot, their rows, and whether these are all exact.
select count(*), coalesce(sum(r.row_count), 0)::bigint, not coalesce(bool_or(r.count_approximate), false)
from {file_reference} r
where r.partition_id <> '' and r.added_xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
    and not pg_visible_in_snapshot(r.added_xid, %(snapshot)s::pg_snapshot);
