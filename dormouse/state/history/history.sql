-- name: current_rows
-- How many rows a row table has now; those that were deleted have no other version any more.
select next_id - 1 - deleted from row_table where table_id = %(table_id)s;
