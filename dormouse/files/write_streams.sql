-- name: advance
-- Notes that a batch is committed, in the transaction that does; gives a row unless it was before, is of another query, or
-- does not follow the last one.
insert into write_stream as s (table_id, name, query_id, batch_id)
values (%(table_id)s, %(name)s, %(query_id)s, %(batch_id)s)
on conflict (table_id, name) do update set batch_id = excluded.batch_id, committed_at = clock_timestamp()
    where s.query_id = excluded.query_id and s.batch_id = excluded.batch_id - 1
returning s.batch_id;

-- name: standing
-- Which query a stream is of, and its last batch.
select query_id, batch_id from write_stream where table_id = %(table_id)s and name = %(name)s;
