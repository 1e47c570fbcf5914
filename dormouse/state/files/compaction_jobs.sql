-- name: create_basic
-- Makes jobs of exactly batch_files unassigned files of a leaf, smallest first, and assigns the files to them.
with {changed}, candidate as (
    select r.partition_id, r.place,
        (row_number() over (partition by r.partition_id order by r.row_count, r.file_id) - 1)
            / %(batch_files)s as batch
    from changed c
    {its_partition}
    cross join lateral (
        select r.ctid as place, r.* from {file_reference} r where r.partition_id = p.partition_id offset 0
    ) r
    where p.sealed_epoch is null and r.job_id is null
), batch as materialized (
    select partition_id, array_agg(place) as places
    from candidate
    group by partition_id, batch
    having count(*) = %(batch_files)s
), {claim};

-- name: create_size_ratio
-- Makes jobs of files of a leaf where the largest is at most 1 / size_ratio times as large as the others together; or, if
-- the others have at least many_rows, 1 / many_ratio times as large.
with {changed}, sized as (
    select r.partition_id, r.place, r.row_count,
        row_number() over smallest_first as position,
        sum(r.row_count) over smallest_first - r.row_count >= least(
            %(size_ratio)s::float8 * r.row_count,
            greatest(%(many_rows)s::float8, %(many_ratio)s::float8 * r.row_count)
        ) as meets
    from changed c
    {its_partition}
    cross join lateral (
        select r.ctid as place, r.* from {file_reference} r where r.partition_id = p.partition_id offset 0
    ) r
    where p.sealed_epoch is null and r.job_id is null
    window smallest_first as (
        partition by r.partition_id order by r.row_count, r.file_id rows unbounded preceding
    )
), candidate as (
    select *, max(position) filter (where meets) over (partition by partition_id) as kept from sized
), batch as materialized (
    select partition_id, array_agg(place) as places
    from candidate
    where position <= kept
    group by partition_id, (position - 1) / %(batch_files)s
    having count(*) > 1 and sum(row_count) - max(row_count) >= least(
        %(size_ratio)s::float8 * max(row_count),
        greatest(%(many_rows)s::float8, %(many_ratio)s::float8 * max(row_count))
    )
), {claim};

-- name: claim
-- Part of creation: assigns the files to their jobs in the same statement, so that no job is made twice. A leaf that gets
-- jobs, or must wait for them because of the limit, is marked for another look: without the files of its jobs, other files
-- may meet the criterion.
due as (
    select distinct partition_id from batch
), {claimed}, {remembered}
select {jobs_claimed}

-- name: create_of_shared
-- Makes jobs of the unassigned files of some leaves that also hold other partitions' rows, to rewrite them without these;
-- or of all unassigned files of these leaves.
with batch as materialized (
    select partition_id, array_agg(place) as places
    from (
        select r.partition_id, r.place,
            (row_number() over (partition by r.partition_id order by r.file_id) - 1) / %(batch_files)s as batch
        from unnest(%(partition_ids)s::text[]) as l (partition_id)
        cross join lateral (
            select r.ctid as place, r.* from {file_reference} r where r.partition_id = l.partition_id offset 0
        ) r
        where r.job_id is null and (%(whole)s or not r.only_contains_data_for_this_partition)
    ) s
    group by partition_id, batch
), {claimed}
select {jobs_claimed};

-- name: create_of_inlined
-- Makes jobs of the unassigned inlined files of a leaf, if these are many or old, or if those of the table are too large
-- together.
with inlined as materialized (
    select r.place, r.partition_id, r.file_id, c.added_at, octet_length(c.content) as byte_count
    from {file_content} c
    cross join lateral (
        select r.ctid as place, r.*
        from {file_reference} r
        where uuid_hash(r.file_id) = uuid_hash(c.file_id) and r.file_id = c.file_id and {live}
        offset 0
    ) r
    where r.job_id is null
), of_leaf as (
    select i.partition_id, i.place, count(*) over leaf as files, min(i.added_at) over leaf as since,
        (row_number() over (leaf order by i.added_at, i.file_id) - 1) / %(inlined_files)s as batch
    from inlined i
    join partition p on p.table_id = %(table_id)s and p.partition_id = i.partition_id
    where p.sealed_epoch is null
    window leaf as (partition by i.partition_id)
), batch as materialized (
    select partition_id, array_agg(place) as places
    from of_leaf
    where files >= %(files_min)s or since < clock_timestamp() - make_interval(secs => %(old_seconds)s)
        or (select sum(byte_count) from inlined) >= %(bytes_max)s
    group by partition_id, batch
), {claimed}
select {jobs_claimed};

-- name: create_of_unread
-- Makes a job that looks for each unassigned file of a leaf that may have rows of a pending deletion, and was not yet read
-- for them. Considers deletions by values, which the keys of a file cannot decide, and all deletions after some days. If no
-- file has to be read, skips these deletions for a while; later it looks again for files of jobs that began before.
with pending as materialized (
    select deletion_id, min_key, max_key
    from deletion
    where table_id = %(table_id)s and retired_xid is null
        and (by_values or deleted_at < clock_timestamp() - make_interval(secs => %(old_seconds)s))
        and (read_at > clock_timestamp() - make_interval(secs => %(reread_seconds)s)) is not true
), batch as materialized (
    select r.partition_id, array[r.ctid] as places
    from {file_reference} r
    join partition p on p.table_id = %(table_id)s and p.partition_id = r.partition_id
    join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
    where exists (select from pending) and r.job_id is null and {live} and p.sealed_epoch is null
        and f.deletions_till < (select max(deletion_id) from pending)
        and exists (select from pending d where d.deletion_id > f.deletions_till and {may_be_of})
), {claimed}, read as (
    update deletion
    set read_at = clock_timestamp()
    where table_id = %(table_id)s and deletion_id in (select deletion_id from pending) and retired_xid is null
        and not exists (select from batch)
)
select {jobs_claimed};

-- name: create_of_deleted
-- Makes jobs of the unassigned files of leaves to which more than deletions_max pending deletions apply, or that were read
-- and have rows of a deletion that is some days old.
with pending as materialized (
    select deletion_id, min_key, max_key, deleted_at < clock_timestamp() - make_interval(secs => %(old_seconds)s) as is_old
    from deletion
    where table_id = %(table_id)s and retired_xid is null
), sorted_ends as materialized (
    -- sorted for binary search; the suffix makes keys that begin with a max_key not greater than it
    select array_agg(deletion_id order by deletion_id) as numbers, array_agg(min_key order by min_key) as mins,
        array_agg(max_key || '\xffffffffffffffff' order by max_key || '\xffffffffffffffff') as maxs,
        array_agg(deletion_id) filter (where is_old) as old
    from pending
), batch as materialized (
    select partition_id, array_agg(place) as places
    from (
        select r.partition_id, r.place,
            (row_number() over (partition by r.partition_id order by r.row_count, r.file_id) - 1)
                / %(batch_files)s as batch
        from (
            select r.ctid as place, r.partition_id, r.file_id, r.row_count
            from {file_reference} r
            join partition p on p.table_id = %(table_id)s and p.partition_id = r.partition_id
            join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
            where (select cardinality(numbers) > %(deletions_max)s or old is not null from sorted_ends)
                and r.job_id is null and {live} and p.sealed_epoch is null
                and (
                    -- the cheap tests first: by numbers, then by keys, and only then against each deletion
                    (
                        (select cardinality(numbers) from sorted_ends)
                        - width_bucket(f.deletions_till, (select numbers from sorted_ends))
                        + coalesce(cardinality(f.deletions_left), 0) > %(deletions_max)s
                        and (
                            width_bucket(f.max_key, (select mins from sorted_ends))
                            - width_bucket(f.min_key, (select maxs from sorted_ends)) > %(deletions_max)s
                        ) is not false
                        and (select count(*) from (select from pending d where {may_be_of} limit %(deletions_max)s + 1) m)
                            > %(deletions_max)s
                    )
                    or f.deletions_left && (select old from sorted_ends)
                )
        ) r
    ) s
    group by partition_id, batch
), {claimed}
select {jobs_claimed};

-- name: create_of_erased
-- Makes jobs, for a run, of the files that have rows of an erasure, in every partition that refers to them.
with batch as materialized (
    select partition_id, array_agg(place) as places
    from (
        select r.partition_id, r.place,
            (row_number() over (partition by r.partition_id order by r.file_id) - 1) / %(batch_files)s as batch
        from erased_file e
        cross join lateral (
            select r.ctid as place, r.*
            from {file_reference} r
            where uuid_hash(r.file_id) = uuid_hash(e.file_id) and r.file_id = e.file_id and {live}
            offset 0
        ) r
        where e.table_id = %(table_id)s and e.freed_at is null and r.job_id is null
    ) s
    group by partition_id, batch
), {claimed}
select {jobs_claimed};

-- name: claimed
-- Part of creation: the jobs of each batch, and their claims.
job as materialized (
    select gen_random_uuid() as job_id, partition_id, places from batch limit %(jobs_max)s
), wanted as materialized (
    select job_id, unnest(places) as place from job
), sorted as materialized (
    select array_agg(place order by place) as places, array_agg(job_id order by place) as job_ids from wanted
), claimed as (
    -- a binary search finds the job of each place, since the plan of a join depends on statistics
    update {file_reference} r
    set job_id = (select job_ids from sorted)[width_bucket(r.ctid, (select places from sorted))]::text,
        last_updated = clock_timestamp()
    where r.ctid = any(array(select place from wanted)) and r.job_id is null
        -- a row that was changed just before has another place
        and r.ctid = (select places from sorted)[width_bucket(r.ctid, (select places from sorted))]
    returning r.file_id
), created as (
    insert into compaction_job (table_id, job_id, partition_id, looks, run_id, run_until)
    select %(table_id)s, job_id::text, partition_id, %(looks)s, %(run_id)s::uuid,
        case when %(run_id)s::uuid is null then '-infinity'
            else clock_timestamp() + make_interval(secs => %(run_seconds)s) end
    from job
)

-- name: jobs_claimed
-- Part of creation: the number of jobs made.
(select count(*) from job) as jobs,
    case when (select count(*) from claimed) < (select count(*) from wanted)
        then lost_race('another transaction assigned some of the files meanwhile') end

-- name: take
-- Leases jobs that no process runs. With a run, those of the run, until its deadline at most. Without a run, those that no
-- live run has; these then belong to no run.
with due as (
    select table_id, job_id, partition_id
    from compaction_job
    where table_id = %(table_id)s and leased_until < statement_timestamp() and {is_open}
    order by leased_until, created_at
    limit %(limit)s
    for update skip locked
), taken as (
    update compaction_job j
    set attempts = attempts + 1,
        leased_until = least(
            clock_timestamp() + make_interval(secs => %(lease_seconds)s),
            case when %(run_id)s::uuid is null then 'infinity' else run_until end
        ),
        run_id = %(run_id)s,
        run_until = case when %(run_id)s::uuid is null then '-infinity' else run_until end
    from due d
    where j.table_id = d.table_id and j.job_id = d.job_id and j.partition_id = d.partition_id
    returning j.job_id, j.partition_id, j.attempts, j.looks
)
select t.job_id, t.partition_id, t.attempts, t.looks, r.filename, r.row_count, r.only_contains_data_for_this_partition,
    not r.count_approximate, f.byte_count, uuid_send(f.digest)
from taken t
left join lateral (
    select * from {file_reference} r where r.partition_id = t.partition_id and r.job_id = t.job_id offset 0
) r on true
left join lateral (select f.* from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
order by t.job_id, t.partition_id, r.filename;

-- name: is_open
-- Part of taking: whether a job can be taken by a run, or without one.
case when %(run_id)s::uuid is null then run_until < clock_timestamp()
    else run_id = %(run_id)s and run_until > clock_timestamp() end

-- name: one_at_a_time
-- Lets only one transaction at a time hand a table's jobs to a run.
select pg_advisory_xact_lock(hashtextextended(%(run_id)s::text, %(table_id)s));

-- name: hand_over
-- Hands jobs that no process runs and no live run has to a run, oldest first, unless the run already has jobs.
with held as materialized (
    select job_id from compaction_job where run_id = %(run_id)s and table_id = %(table_id)s
), due as (
    select table_id, job_id, partition_id
    from compaction_job
    where table_id = %(table_id)s and leased_until < clock_timestamp() and run_until < clock_timestamp()
        and not exists (select from held)
    order by created_at, job_id
    limit %(limit)s
    for update skip locked
), handed as (
    update compaction_job j
    set run_id = %(run_id)s, run_until = clock_timestamp() + make_interval(secs => %(seconds)s)
    from due d
    where j.table_id = d.table_id and j.job_id = d.job_id and j.partition_id = d.partition_id
    returning j.job_id
)
select job_id from held
union
select job_id from handed
order by job_id;

-- name: release_run
-- Deletes a limited number of jobs that a run has not finished, and releases their files; returns the numbers of jobs and
-- files. Locks references in the order of their keys, as all statements do.
with gone as (
    delete from compaction_job
    where ctid = any(array(
        select ctid from compaction_job
        where run_id = %(run_id)s and table_id = %(table_id)s
        limit %(limit)s
        for update
    ))
    returning job_id, partition_id
), held as materialized (
    select r.partition_id, r.file_id, r.job_id
    from gone g
    cross join lateral (
        select r.partition_id, r.file_id, r.job_id
        from {file_reference} r
        where r.partition_id = g.partition_id and r.job_id = g.job_id
        offset 0
    ) r
    order by r.partition_id, r.file_id
), locked as materialized (
    select l.place
    from held h
    cross join lateral (
        select r.ctid as place
        from {file_reference} r
        where r.partition_id = h.partition_id and r.file_id = h.file_id and r.job_id = h.job_id
        for update
    ) l
), {freed}, {mark_freed}
select (select count(*) from gone), {freed_whole};

-- name: open_jobs
-- The number of jobs of each table that a run has or could be handed.
select table_id, count(*)
from compaction_job
where run_id = %(run_id)s or leased_until < clock_timestamp() and run_until < clock_timestamp()
group by table_id;

-- name: tables_of_run
-- The tables of which a run has jobs, and the number of jobs.
select table_id, count(*)
from compaction_job
where run_id = %(run_id)s
group by table_id
order by table_id;

-- name: forget_run
-- Deletes a run's jobs of dropped tables.
delete from compaction_job j
where run_id = %(run_id)s and not exists (select from tables t where t.table_id = j.table_id);

-- name: hold
-- Locks a job that is still leased to an attempt; returns nothing if another process has taken or ended it.
select job_id
from compaction_job
where table_id = %(table_id)s and job_id = %(job_id)s and partition_id = %(partition_id)s
    and attempts = %(attempt)s
for update;

-- name: renew
-- Extends the lease of a job that an attempt still has; released jobs stay so.
update compaction_job
set leased_until = least(
    clock_timestamp() + make_interval(secs => %(lease_seconds)s), case when run_id is null then 'infinity' else run_until end
)
where table_id = %(table_id)s and job_id = %(job_id)s and partition_id = %(partition_id)s
    and attempts = %(attempt)s and leased_until > '-infinity';

-- name: release
-- Puts a failed job back, to be run again.
update compaction_job
set leased_until = '-infinity', last_error = %(error)s
where table_id = %(table_id)s and job_id = %(job_id)s and partition_id = %(partition_id)s;

-- name: put_back
-- Puts back a job that was taken and not run; the attempt is not counted.
update compaction_job
set leased_until = '-infinity', attempts = attempts - 1
where table_id = %(table_id)s and job_id = %(job_id)s and partition_id = %(partition_id)s
    and attempts = %(attempt)s;

-- name: count_open
-- The number of jobs that could be taken, by a run or without one.
select count(*)
from compaction_job
where table_id = %(table_id)s and leased_until < statement_timestamp() and {is_open};

-- name: due
-- The number of jobs that could be taken, by a run or without one, the rows of their files, and an estimate of the bytes (100
-- a row where unknown).
select count(distinct j.job_id), coalesce(sum(r.row_count), 0),
    coalesce(sum(r.row_count::float8 * coalesce(f.byte_count / nullif(f.row_count, 0)::float8, 100)), 0)
from compaction_job j
left join lateral (
    select * from {file_reference} r where r.partition_id = j.partition_id and r.job_id = j.job_id offset 0
) r on true
left join lateral (select * from ({file_facts}) f where f.file_id = r.file_id offset 0) f on true
where j.table_id = %(table_id)s and j.leased_until < clock_timestamp() and {is_open};

-- name: count
-- The number of jobs, and of those that are running.
select count(*), count(*) filter (where leased_until > clock_timestamp())
from compaction_job
where table_id = %(table_id)s;

-- name: page
-- A page of the jobs by id: whether each is running, the run of Spark that has it, and its last error.
select job_id, partition_id, created_at, attempts, leased_until > clock_timestamp(), run_id::text, last_error
from compaction_job
where table_id = %(table_id)s and (job_id, partition_id) > (%(job_id)s, %(partition_id)s)
order by job_id, partition_id
limit %(limit)s;

-- name: beside_job
-- The files and loads that may have older rows of the keys of a job's files: the smallest place of an open load, and the
-- other files of the partition and of those above it, with their keys. Also whether the partition is a leaf, as otherwise
-- its files may belong to other partitions, too; and the smallest and largest keys of the job's files.
with recursive upwards as (
    select p.partition_id, p.parent_id, p.sealed_epoch is null and p.merged_epoch is null as is_leaf
    from partition p
    where p.table_id = %(table_id)s and p.partition_id = %(partition_id)s
    union all
    select p.partition_id, p.parent_id, false
    from upwards u
    join partition p on p.table_id = %(table_id)s and p.partition_id = u.parent_id
), beside as materialized (
    select distinct r.file_id
    from upwards u
    cross join lateral (
        select r.file_id from {file_reference} r where r.partition_id = u.partition_id offset 0
    ) r
    where r.file_id <> all(%(file_ids)s::uuid[])
), fact as materialized (
    select f.filename, f.min_key, f.max_key
    from beside b
    left join lateral (select f.* from ({file_facts}) f where f.file_id = b.file_id offset 0) f on true
), input as materialized (
    select f.min_key, f.max_key
    from unnest(%(file_ids)s::uuid[]) as i (file_id)
    left join lateral (select f.* from ({file_facts}) f where f.file_id = i.file_id offset 0) f on true
)
select coalesce((select bool_or(is_leaf) from upwards), false), (
        select min(a.sequence)
        from write_attempt a
        where a.table_id = %(table_id)s and a.abandoned_at is null and a.finished_at is null
    ), array(select filename from fact order by filename), array(select min_key from fact order by filename),
    array(select max_key from fact order by filename),
    array(select min_key from input), array(select max_key from input);
