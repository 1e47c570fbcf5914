-- name: make_blob
-- The history as one value.
create table blob (table_id integer primary key, content bytea not null)

-- name: write_blob
-- All of it.
insert into blob values (1, %(content)s) on conflict (table_id) do update set content = excluded.content

-- name: read_blob
-- All of it.
select content from blob where table_id = 1
