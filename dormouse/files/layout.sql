-- name: create
-- Makes a table's own partition of the references, and what its layout keeps beside it.
create table {file_reference} (like file_reference including all);
alter table {file_reference} set (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05);
alter table file_reference attach partition {file_reference} for values in ({table_id});
{create_files};
