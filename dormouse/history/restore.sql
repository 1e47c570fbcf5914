-- name: lock
-- Waits for what else changes where a table is, and keeps others out: splits, cuts, and who lets files go.
select 1 from tables where table_id = %(table_id)s for no key update;
