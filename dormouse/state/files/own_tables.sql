-- name: layout
-- The layout that a table has now.
select layout from tables where table_id = %(table_id)s;
