-- name: answer
-- What became of the commit of a write attempt: whether the attempt ended with it, whether the attempt was
-- abandoned, whether its table has the commit, and why it was refused since the attempt began.
select
    a.attempt_id is null or a.finished_at is not null as ended,
    a.abandoned_at is not null as abandoned,
    exists (
        select from applied_commit c where c.table_id = %(table_id)s and c.commit_key = %(commit_key)s
    ) as applied,
    r.error
from (values (1)) one (row)
left join write_attempt a on a.table_id = %(table_id)s and a.attempt_id = %(attempt_id)s
-- an older refusal is that of an earlier run with the same id
left join rejected_commit r on
    r.commit_key = %(commit_key)s and r.rejected_at > a.started_at
    and (r.table_id is null or r.table_id = %(table_id)s);
