-- name: make_blob
-- A table that holds a history as one value.
create table blob (table_id integer primary key, content bytea not null)

-- name: write_blob
-- Writes the whole history.
insert into blob values (1, %(content)s) on conflict (table_id) do update set content = excluded.content

-- name: read_blob
-- Reads the whole history.
select content from blob where table_id = 1
