-- name: note
-- Notes a file that was put; no row: the table is gone.
insert into cell_file (table_id, file_id, byte_count, sha256)
select table_id, %(file_id)s, %(byte_count)s, %(sha256)s from row_table where table_id = %(table_id)s
returning file_id;

-- name: noted
-- The files of a table that were noted, a page at a time.
select file_id, byte_count, sha256
from cell_file
where table_id = %(table_id)s and file_id > %(after)s
order by file_id
limit %(limit)s;

-- name: of_ids
-- Those of a table's files that have these ids.
select file_id, byte_count, sha256
from cell_file
where table_id = %(table_id)s and file_id = any(%(file_ids)s);
