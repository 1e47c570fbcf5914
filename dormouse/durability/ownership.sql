-- name: incarnations
-- The last incarnations, the latest first, and whether each was made in this very database.
select i.number, replace(i.incarnation_id::text, '-', ''), i.confirmed, i.reason,
    (i.system_identifier, i.timeline, i.database_oid) = (d.system_identifier, d.timeline, d.database_oid)
        and coalesce(i.cluster = %(cluster)s::text, true)
from incarnation i
cross join this_database() d
order by i.number desc
limit %(limit)s;

-- name: adopted
-- The incarnation that the last adoption began; 0: none was adopted.
select coalesce(max(number), 0) from incarnation where reason = 'adoption' and confirmed;

-- name: has_files
-- Whether any file is tracked, or ever was.
select exists (select from tracked_file) or exists (select from applied_commit);

-- name: intend
-- An incarnation that the store does not have yet; gives its UUID.
insert into incarnation (number, reason, cluster, system_identifier, timeline, database_oid)
select %(number)s, %(reason)s, %(cluster)s::text, d.* from this_database() d
returning replace(incarnation_id::text, '-', '');

-- name: confirm
-- The store has it, too; forgets those of long ago, but not the last adoption.
with confirmed as (update incarnation set confirmed = true where number = %(number)s)
delete from incarnation i
where number < %(number)s - %(kept)s
    and (reason <> 'adoption' or exists (select from incarnation l where l.reason = 'adoption' and l.number > i.number));

-- name: withdraw
-- Forgets what the store gave to another.
delete from incarnation where number = %(number)s and not confirmed;

-- name: forget_writers
-- Of a database that is adopted: nobody writes or works for it yet, and what others wrote is theirs to collect.
with jobs as (
    update compaction_job set leased_until = '-infinity', run_id = null, run_until = '-infinity'
    where leased_until > '-infinity' or run_id is not null
),
messages as (update commit_message set visible_at = clock_timestamp() where visible_at > clock_timestamp()),
holds as (delete from hold)
delete from write_attempt;
