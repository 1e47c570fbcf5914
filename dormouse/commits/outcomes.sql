-- name: statuses
-- What became of some commits, in their order: applied, pending in the queue, refused and why; to the table named, or
-- where none is to any that has the id.
select
    a.applied_at is not null
        and not m.is_of_another
        -- just applied: its message goes when a crash cannot undo it any more
        and not (m.pending and a.applied_at > clock_timestamp() - make_interval(secs => %(durable_seconds)s)) as applied,
    m.pending,
    r.error,
    a.refused,
    a.name
from unnest(%(commit_keys)s::uuid[], %(table_ids)s::integer[]) with ordinality k (commit_key, table_id, number)
left join lateral (
    select c.applied_at, c.refused, t.name
    from applied_commit c
    cross join lateral (select t.name from tables t where t.table_id = c.table_id offset 0) t
    where c.commit_key = k.commit_key and c.table_id = coalesce(k.table_id, c.table_id)
    order by c.refused is null
    limit 1
) a on true
cross join lateral (
    select count(*) > 0 as pending,
        coalesce(bool_or(not exists (
            select from applied_commit c
            where c.commit_key = k.commit_key and c.table_id = coalesce(of.table_id, c.table_id)
            offset 0
        )), false) as is_of_another
    from (select body from commit_message m where m.commit_key = k.commit_key offset 0) m
    cross join lateral (select {table_of_message} as table_id offset 0) of
    where coalesce(of.table_id = k.table_id, true)
) m
-- what was refused before it was applied after all is forgotten, though its committer may have died before it said so
left join lateral (
    select r.rejected_at, r.error
    from rejected_commit r
    where r.commit_key = k.commit_key
        and (r.table_id is null or k.table_id is null or r.table_id = k.table_id)
    offset 0
) r on a.applied_at is null or r.rejected_at > a.applied_at
order by k.number;

-- name: table_of_message
-- The table that a message m is for; null where it does not tell. Not read as JSON, since anything may have been sent.
substring(left(m.body, 4000) from '"table_id":(\d{1,9})[,}]')::integer

-- name: await
-- Waits until one of these commits has no message any more, or the time is over; gives how often it looked again.
select await_messages(%(awaited_keys)s::uuid[], %(usual)s, %(seconds)s);

-- name: settle
-- Keeps why commits were refused, and forgets it of those that are applied after all; what they changed is on disk then.
-- Gives the numbers of the applied commits that this server does not have: it, or the server before it, died after they
-- were applied. Then no refusal is kept, since it may rest on what was lost.
with missing as materialized (
    select p.number
    from unnest(%(proved_keys)s::uuid[], %(proved_table_ids)s::integer[]) with ordinality
        p (commit_key, table_id, number)
    where not exists (
            select from applied_commit c
            where c.commit_key = p.commit_key and c.table_id = coalesce(p.table_id, c.table_id)
            offset 0
        )
        -- a table that was dropped meanwhile took its commits along
        and (p.table_id is null or exists (select from tables t where t.table_id = p.table_id offset 0))
), applied as (
    delete from rejected_commit
    where not exists (select from missing) and ctid = any(array(
        select l.place
        from unnest(%(applied_keys)s::uuid[], %(applied_table_ids)s::integer[]) as a (commit_key, table_id)
        cross join lateral (
            select r.ctid as place
            from rejected_commit r
            where r.commit_key = a.commit_key and (r.table_id is null or r.table_id = a.table_id)
            offset 0
        ) l
    ))
), refused as (
    insert into rejected_commit (commit_key, commit_id, table_id, error_class, error)
    select *
    from unnest(
        %(commit_keys)s::uuid[], %(commit_ids)s::text[], %(table_ids)s::integer[], %(error_classes)s::text[],
        %(errors)s::text[]
    )
    where not exists (select from missing)
    on conflict (commit_key) do update set
        table_id = excluded.table_id, error_class = excluded.error_class, error = excluded.error,
        rejected_at = clock_timestamp()
)
select array(select number from missing), {durably};

-- name: forget_rejected
-- Forgets commits that were refused long ago.
delete from rejected_commit where rejected_at < clock_timestamp() - make_interval(secs => %(kept_seconds)s::float8);

-- name: dead_letters
-- The last messages that could not be handled.
select queue, reason, receive_count, sent_at, buried_at, left(body, 200)
from dead_commit_message
order by buried_at desc
limit %(limit)s;
