-- name: partition_page
-- The partitions after one, by id: all, or the leaves alone.
select partition_id, parent_id, min_keys, max_keys, split_key, split_point, left_id, right_id
from partition
where table_id = %(table_id)s and partition_id > %(after)s and (sealed_epoch is null or not %(leaves)s)
order by partition_id
limit %(limit)s;
