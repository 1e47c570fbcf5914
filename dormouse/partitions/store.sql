-- name: add_partitions
-- Adds partitions of an epoch.
insert into partition (
    table_id, partition_id, parent_id, created_epoch, sealed_epoch, min_keys, max_keys, split_key,
    split_point, left_id, right_id
)
values (
    %(table_id)s, %(partition_id)s, %(parent_id)s, %(created_epoch)s, %(sealed_epoch)s, %(min_keys)s::bytea[],
    %(max_keys)s::bytea[], %(split_key)s, %(split_point)s, %(left_id)s, %(right_id)s
);

-- name: seal
-- Ends a leaf at an epoch, divided into two.
update partition
set sealed_epoch = %(sealed_epoch)s, split_key = %(split_key)s, split_point = %(split_point)s,
    left_id = %(left_id)s, right_id = %(right_id)s
where table_id = %(table_id)s and partition_id = %(partition_id)s;

-- name: next_epoch
-- Begins the table's next epoch; two splits of one table wait for each other here.
update tables set epoch = epoch + 1 where table_id = %(table_id)s returning epoch;

-- name: add_epoch
-- Records an epoch: its time strictly increases.
insert into epoch (table_id, epoch, created_at, sealed, created)
select %(table_id)s, %(epoch)s::bigint, greatest(clock_timestamp(), max(e.created_at) + interval '1 microsecond'),
    %(sealed)s::text[], %(created)s::text[]
from (
    select created_at from epoch where table_id = %(table_id)s order by created_at desc limit 1
) e;

-- name: partition
-- One partition.
select partition_id, parent_id, min_keys, max_keys, split_key, split_point, left_id, right_id
from partition
where table_id = %(table_id)s and partition_id = %(partition_id)s;
