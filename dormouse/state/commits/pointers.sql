-- name: needless
-- Returns the numbers of bodies that no message needs: those of applied commits after a while, and others when they are
-- older than any pause of an instance. The body of a dead letter is needed.
select b.number
from unnest(%(commit_keys)s::uuid[], %(table_ids)s::bigint[], %(made_at)s::float8[]) with ordinality
    b (commit_key, table_id, made_at, number)
cross join lateral (select extract(epoch from clock_timestamp()) - b.made_at as seconds) age
where not exists (select from commit_message m where m.commit_key = b.commit_key offset 0)
    -- another timeline may need a body from before an adoption
    and not exists (
        select from incarnation i
        where i.reason = 'adoption' and extract(epoch from i.made_at) > coalesce(b.made_at, 0)
    )
    and b.commit_key not in (select commit_key from dead_commit_message where commit_key is not null)
    and (
        age.seconds > %(kept_seconds)s
        -- an older Dormouse made names without a time
        or coalesce(age.seconds > %(applied_seconds)s, true)
        and exists (
            select from applied_commit c
            where c.commit_key = b.commit_key and c.table_id = coalesce(b.table_id, c.table_id)
            offset 0
        )
    );

-- name: forget_dead_pointers
-- Deletes buried messages with a body whose tables no longer exist.
with dead as materialized (
    select message_id, {table_of_message} as table_id
    from dead_commit_message m
    where body like '{"version":1,"type":"pointer",%'
)
delete from dead_commit_message d
using dead
where d.message_id = dead.message_id and dead.table_id is not null
    and not exists (select from tables t where t.table_id = dead.table_id);
