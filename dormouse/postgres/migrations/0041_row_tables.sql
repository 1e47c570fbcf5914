-- Ids of row changes that changed nothing, and how many rows a row table has.

-- of a change that changed nothing: how many rows were as they were wanted; null: the change is in row_change
alter table row_change_id add column unchanged bigint;

-- Rows that were deleted: with `next_id`, how many there are, without a look at their ranges.
alter table row_table add column deleted bigint not null default 0;
update row_table t
set deleted = r.deleted
from (
    select table_id, sum(last_id - first_id + 1)::bigint as deleted from row_range where is_deleted group by table_id
) r
where r.table_id = t.table_id;
