-- name: aggregates
-- Whether rows of equal key are merged; nobody changes that until the transaction ends.
select properties ->> 'aggregate' is not null from tables where table_id = %(table_id)s for share;

-- name: record
-- Records a deletion, while references are added by nobody.
insert into deletion (table_id, deletion_id, condition, min_keys, max_keys, by_values, epoch)
select t.table_id, 1 + coalesce((select max(deletion_id) from deletion where table_id = %(table_id)s), 0), %(condition)s,
    %(min_keys)s::bytea[], %(max_keys)s::bytea[], %(by_values)s, t.epoch
from tables t
where t.table_id = %(table_id)s
returning deletion_id, deleted_at;

-- name: list
-- A table's deletions by number, pending ones or all, each with whether it is pending.
select deletion_id, condition, by_values, deleted_at, retired_xid is null
from deletion
where table_id = %(table_id)s and (retired_xid is null or %(all)s)
order by deletion_id;

-- name: count_pending
-- How many deletions readers apply.
select count(*) from deletion where table_id = %(table_id)s and retired_xid is null;
