-- name: look
-- A row table now: its newest version, the commit time and columns of a version (null columns: the caller knows them),
-- and its index with the last failure.
select
    t.name, t.table_uuid, r.version,
    coalesce(
        (
            select changed_at from row_change
            where table_id = r.table_id and last_version >= %(as_of)s::bigint
            order by last_version
            limit 1
        ),
        r.changed_at
    ) as changed_at,
    c.since_version,
    case when c.since_version is distinct from %(known_since)s then c.columns end as columns,
    (
        select incarnation_id from incarnation where reason <> 'start' order by number desc limit 1
    ) as incarnation_id,
    (select instance_id from instance) as instance_id,
    i.database, i.build_id, i.failure
from tables t
    join row_table r on r.table_id = t.table_id
    cross join lateral (
        select since_version, columns from row_columns
        where table_id = r.table_id and since_version <= coalesce(%(as_of)s, r.version)
        order by since_version desc
        limit 1
    ) c
    left join row_index i on i.table_id = t.table_id
where t.table_id = %(table_id)s;

-- name: as_added
-- Columns as they were added, before any change of their types.
select distinct on (column_id) c.value
from row_columns r
    cross join lateral jsonb_array_elements(r.columns) c
    cross join lateral (select (c.value ->> 'column_id')::integer as column_id) i
where r.table_id = %(table_id)s and column_id = any(%(column_ids)s)
order by column_id, since_version;

-- name: changed_count
-- The number of rows whose version is newer than the given one.
select coalesce(sum(last_id - first_id + 1), 0)::bigint
from row_range
where table_id = %(table_id)s and version > %(after)s;

-- name: place
-- Records the database in which an index is to be built, unless another process changed the record.
insert into row_index as i (table_id, database) values (%(table_id)s, %(database)s)
on conflict on constraint row_index_pkey do update
set database = excluded.database, build_id = null
where i.database is not distinct from %(was_database)s and i.build_id is not distinct from %(was_build_id)s;

-- name: built
-- Records the new build of an index. No row: another process replaced the old build first.
update row_index
set database = %(database)s, build_id = %(build_id)s, failure = null, failed_at = null
where table_id = %(table_id)s and build_id is not distinct from %(was_build_id)s
    and database is not distinct from %(was_database)s
returning table_id;

-- name: failed
-- Records the failure of work on an index, for the error messages of queries.
update row_index set failure = %(failure)s, failed_at = clock_timestamp() where table_id = %(table_id)s;

-- name: used
-- Records the use of an index, in seconds of queries.
update row_index
set load = load * exp(-ln(2.0) * extract(epoch from clock_timestamp() - used_at) / 3600) + %(seconds)s,
    used_at = clock_timestamp()
where table_id = %(table_id)s;

-- name: loads
-- All indexes, with their current load.
select
    i.table_id, t.name, i.database, i.build_id,
    i.load * exp(-ln(2.0) * extract(epoch from clock_timestamp() - i.used_at) / 3600) as load,
    extract(epoch from clock_timestamp() - i.used_at)::double precision as idle_seconds
from row_index i join tables t using (table_id)
order by i.table_id;

-- name: forget
-- Deletes the record of an idle index, unless it was used or replaced meanwhile.
delete from row_index
where table_id = %(table_id)s and build_id is not distinct from %(build_id)s
    and used_at < clock_timestamp() - make_interval(secs => %(idle_seconds)s)
returning table_id;

-- name: make_key
-- Makes the key of page tokens if there is none.
insert into row_page_key (key) values (uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())) on conflict do nothing;

-- name: key
-- The key of page tokens.
select key from row_page_key;

-- name: whose
-- The id of this instance.
select instance_id from instance;
