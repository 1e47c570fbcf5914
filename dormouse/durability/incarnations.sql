-- name: incarnations
-- Returns the last incarnations, the latest first; whether each was made in this very database, and its last milestone.
select i.number, replace(i.incarnation_id::text, '-', ''), i.confirmed, i.reason,
    (i.system_identifier, i.timeline, i.database_oid) = (d.system_identifier, d.timeline, d.database_oid)
        and coalesce(i.cluster = %(cluster)s::text, true),
    i.milestone, replace(i.milestone_id::text, '-', ''),
    -- abs(), as the time is in the future after the clock was set back
    coalesce(abs(extract(epoch from clock_timestamp() - i.passed_at)), 'infinity')::float8,
    -- false only if no transaction ran when the milestone was passed, and none but that one has begun since
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
-- Returns the incarnation that the last adoption began; 0 if there was none.
select coalesce(max(number), 0) from incarnation where reason = 'adoption' and confirmed;

-- name: on_disk
-- Makes the transaction wait for the disk, whatever the role's settings: a crash must not lose what the store refers to.
set local synchronous_commit = on;

-- name: intend
-- Records an incarnation that the store does not have yet.
insert into incarnation (number, reason, cluster, added_xid, system_identifier, timeline, database_oid)
select %(number)s, %(reason)s, %(cluster)s::text, coalesce(%(began_xid)s::bigint::text::xid8, pg_current_xact_id()), d.*
from this_database() d;

-- name: confirm
-- Confirms an incarnation, which the store has now, too; deletes old ones, but not the last adoption.
with confirmed as (
    update incarnation set confirmed = true, passed_at = clock_timestamp(), passed_in = pg_current_snapshot()
    where number = %(number)s and not confirmed
)
delete from incarnation i
where number < %(number)s - %(kept)s
    and (reason <> 'adoption' or exists (select from incarnation l where l.reason = 'adoption' and l.number > i.number));

-- name: withdraw
-- Deletes an intended incarnation whose number another database has got.
delete from incarnation where number = %(number)s and not confirmed;
