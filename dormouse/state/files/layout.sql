-- name: create
-- Creates a table's own partition of the references, and the tables that its layout needs beside it.
create table {file_reference} (like file_reference including all)
-- room for a second version of each row on its page: a job's claim then touches no index
with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.05);
alter table file_reference attach partition {file_reference} for values in ({table_id});
{create_files};
{attach_files};

-- name: layout_of_table
-- The layout that a table has now.
select layout from tables where table_id = %(table_id)s;
