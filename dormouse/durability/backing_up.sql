-- name: dropped
-- The prefixes of objects of tables that are gone.
select object_prefix
from write_attempt a
where abandoned_at is not null and not exists (select from tables t where t.table_id = a.table_id);
