-- name: dropped
-- Returns the object prefixes of tables that were dropped.
select object_prefix
from write_attempt a
where abandoned_at is not null and not exists (select from tables t where t.table_id = a.table_id);

-- name: submitted
-- Returns a page of the messages that wait to be applied.
select commit_key::text, message_id::text, body
from commit_message
where (commit_key, message_id) > (%(commit_key)s::uuid, %(message_id)s::uuid)
order by commit_key, message_id
limit %(limit)s;

-- name: note_backup
-- Records that a backup is taken, before anything is in it.
insert into backup_taken (place, name) values (%(place)s, %(name)s) on conflict do nothing;

-- name: forget_backup
-- Deletes the record of a backup that failed, and whose objects were removed.
delete from backup_taken where place = %(place)s and name = %(name)s;
