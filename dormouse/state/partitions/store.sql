-- name: partition
-- One partition.
select partition_id, parent_id, min_keys, max_keys, split_key, split_point, left_id, right_id
from partition
where table_id = %(table_id)s and partition_id = %(partition_id)s;
