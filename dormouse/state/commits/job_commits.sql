-- name: answers
-- Returns the state of each write attempt and its commit, in the order given: has the attempt ended, was it abandoned,
-- does its table have the commit, and why was the commit refused since the attempt began, with the class of the error.
select
    (a.attempt_id is null or a.finished_at is not null) and c.may_be_undone is not true as ended,
    a.abandoned_at is not null as abandoned,
    c.may_be_undone is false as applied,
    r.error,
    r.error_class
from unnest(%(table_ids)s::integer[], %(attempt_ids)s::uuid[], %(commit_keys)s::uuid[]) with ordinality
    w (table_id, attempt_id, commit_key, number)
left join lateral (
    -- applied just now: the committer deletes its message once a crash can no longer undo it
    select c.applied_at > clock_timestamp() - make_interval(secs => %(durable_seconds)s)
        and exists (
            select from commit_message m
            where m.commit_key = w.commit_key and coalesce({table_of_message} = w.table_id, true)
            offset 0
        ) as may_be_undone
    from applied_commit c
    where c.table_id = w.table_id and c.commit_key = w.commit_key
    offset 0
) c on true
left join lateral (
    select * from write_attempt a where a.table_id = w.table_id and a.attempt_id = w.attempt_id offset 0
) a on true
left join lateral (
    select error, error_class
    from rejected_commit r
    where r.commit_key = w.commit_key
        -- an older refusal is of an earlier run with the same id
        and r.rejected_at > a.started_at
        and (r.table_id is null or r.table_id = w.table_id)
    offset 0
) r on true
order by w.number;

-- name: forget_refusal
-- Forgets why a commit was refused, so that only a later refusal answers the next request with its id.
delete from rejected_commit where commit_key = %(commit_key)s;
