-- name: file_page
-- The files after one with their facts, by id, which is a hash of the name.
select f.filename, f.byte_count, f.row_count, f.min_key, f.max_key, f.added_at, f.unreferenced_at
from ({file_facts}) f
where f.file_id > %(after)s
order by f.file_id
limit %(limit)s;
