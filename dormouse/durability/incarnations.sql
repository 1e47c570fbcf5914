-- name: incarnations
-- The last incarnations, the latest first; whether each was made in this very database, and how far it has come.
select i.number, replace(i.incarnation_id::text, '-', ''), i.confirmed, i.reason,
    (i.system_identifier, i.timeline, i.database_oid) = (d.system_identifier, d.timeline, d.database_oid)
        and coalesce(i.cluster = %(cluster)s::text, true),
    i.milestone, replace(i.milestone_id::text, '-', ''),
    -- one of the future: the clock was set back
    coalesce(abs(extract(epoch from clock_timestamp() - i.passed_at)), 'infinity')::float8,
    -- nothing was under way then, and no transaction but the one that passed it has begun since
    coalesce(
        pg_snapshot_xmin(i.passed_in) <> pg_snapshot_xmax(i.passed_in)
            or pg_snapshot_xmax(pg_current_snapshot())::text::numeric
                > pg_snapshot_xmax(i.passed_in)::text::numeric + 1,
        true
    )
from incarnation i
cross join this_database() d
order by i.number desc
limit %(limit)s;

-- name: adopted
-- The incarnation that the last adoption began; 0: none was adopted.
select coalesce(max(number), 0) from incarnation where reason = 'adoption' and confirmed;

-- name: on_disk
-- The transaction waits for the disk, whatever the role asks: what the store knows, a crash must not lose.
set local synchronous_commit = on;

-- name: intend
-- An incarnation that the store does not have yet.
insert into incarnation (number, reason, cluster, added_xid, system_identifier, timeline, database_oid)
select %(number)s, %(reason)s, %(cluster)s::text, coalesce(%(began_xid)s::bigint::text::xid8, pg_current_xact_id()), d.*
from this_database() d;

-- name: confirm
-- The store has it, too; forgets those of long ago, but not the last adoption.
with confirmed as (
    update incarnation set confirmed = true, passed_at = clock_timestamp(), passed_in = pg_current_snapshot()
    where number = %(number)s and not confirmed
)
delete from incarnation i
where number < %(number)s - %(kept)s
    and (reason <> 'adoption' or exists (select from incarnation l where l.reason = 'adoption' and l.number > i.number));

-- name: withdraw
-- Forgets what the store gave to another.
delete from incarnation where number = %(number)s and not confirmed;
