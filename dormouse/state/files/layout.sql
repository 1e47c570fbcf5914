-- name: create
-- Creates a table's own partition of the references, and the tables that its layout needs beside it.
create table {file_reference} (like file_reference including all)
-- room for a second version of each row on its page: a job's claim then touches no index
with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.05);
alter table file_reference attach partition {file_reference} for values in ({table_id});
{create_files};
-- never updated; "external", as the content is compressed
create table {file_content} (like file_content including all) with (toast_tuple_target = 8160);
{attach_files};
alter table file_content attach partition {file_content} for values in ({table_id});

-- name: contents
-- The bytes of some inlined files, and of the rows that deletions list.
select c.file_id, c.content from {file_content} c where c.file_id = any(%(file_ids)s::uuid[])
union all
select c.content_id, c.content
from deletion_content c
where c.table_id = %(table_id)s and c.content_id = any(%(file_ids)s::uuid[]);

-- name: inlined_total
-- The number and the bytes of the inlined files.
select count(*), coalesce(sum(octet_length(c.content)), 0)::bigint from {file_content} c;

-- name: vacuum_content
-- Frees the space of deleted content.
vacuum {file_content};

-- name: layout_of_table
-- The layout that a table has now.
select layout from tables where table_id = %(table_id)s;
