-- name: advance
-- Records that a batch is committed, in the transaction that commits it. Returns no row if the batch was committed before,
-- belongs to another query, or does not follow the last one. The first batch of a new stream is 0.
insert into write_stream as s (table_id, name, query_id, batch_id)
select %(table_id)s, %(name)s, %(query_id)s, %(batch_id)s
where %(batch_id)s = 0 or exists (select from write_stream where table_id = %(table_id)s and name = %(name)s)
on conflict (table_id, name) do update set batch_id = excluded.batch_id, committed_at = clock_timestamp()
    where s.query_id = excluded.query_id and s.batch_id = excluded.batch_id - 1
returning s.batch_id;

-- name: standing
-- The query of a stream, and its last batch.
select query_id, batch_id from write_stream where table_id = %(table_id)s and name = %(name)s;

-- name: note
-- Records a file that was put; returns no row if the table was dropped.
insert into cell_file (table_id, file_id, byte_count, sha256)
select table_id, %(file_id)s, %(byte_count)s, %(sha256)s from row_table where table_id = %(table_id)s
returning file_id;

-- name: noted
-- A page of the recorded files of a table, sorted by id.
select file_id, byte_count, sha256
from cell_file
where table_id = %(table_id)s and file_id > %(after)s
order by file_id
limit %(limit)s;

-- name: of_ids
-- The recorded files of a table that have these ids.
select file_id, byte_count, sha256
from cell_file
where table_id = %(table_id)s and file_id = any(%(file_ids)s);
