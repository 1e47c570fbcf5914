-- name: statuses
-- Returns the states of commits, in the order given: applied, pending in the queue, why refused. Where no table is given,
-- any table that has the commit id counts.
select
    a.applied_at is not null
        and not m.is_of_another
        -- applied just now: the committer deletes its message once a crash can no longer undo it
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
-- a refusal from before the commit was applied does not count; its committer may have died before it deleted the refusal
left join lateral (
    select r.rejected_at, r.error
    from rejected_commit r
    where r.commit_key = k.commit_key
        and (r.table_id is null or k.table_id is null or r.table_id = k.table_id)
    offset 0
) r on a.applied_at is null or r.rejected_at > a.applied_at
order by k.number;

-- name: table_of_message
-- The table of a message m; null where the message names none. It is not parsed as JSON, since anything may have been sent.
substring(left(m.body, 4000) from '"table_id":(\d{1,9})[,}]')::integer

-- name: await
-- Waits until one of these commits no longer has a message, or the time is over; returns how often it looked again.
select await_messages(%(awaited_keys)s::uuid[], %(usual)s, %(seconds)s);

-- name: settle
-- Records why commits were refused, and deletes the refusals of commits that are applied after all. Returns the numbers,
-- from 1, of lost commits: they were applied, but the server crashed since, or a standby without them took over. Commits are
-- looked for only if this session is younger than they are. If one is lost, no refusal is recorded, as its reason may be
-- lost, too. Everything that is found is on disk when this ends.
with sent as materialized (
    select k.number, k.commit_key, k.table_id, k.clears, coalesce(c.is_there, %(is_same_server)s) as is_there
    from unnest(%(applied_keys)s::uuid[], %(applied_table_ids)s::integer[], %(clears)s::boolean[])
        with ordinality k (commit_key, table_id, clears, number)
    left join lateral (
        select true as is_there
        from applied_commit c
        where c.commit_key = k.commit_key and c.table_id = coalesce(k.table_id, c.table_id) and not %(is_same_server)s
        limit 1
    ) c on true
), lost as materialized (
    select array_agg(number order by number) as numbers
    from sent s
    where not s.is_there
        -- a table that was dropped meanwhile has lost its commits with it
        and (s.table_id is null or exists (select from tables t where t.table_id = s.table_id offset 0))
), applied as (
    delete from rejected_commit
    where ctid = any(array(
        select l.place
        from sent s
        cross join lateral (
            select r.ctid as place
            from rejected_commit r
            where r.commit_key = s.commit_key and (r.table_id is null or r.table_id = s.table_id)
            offset 0
        ) l
        where s.is_there and s.clears  -- not if the same batch has a refusal of the same id
    ))
), refused as (
    insert into rejected_commit (commit_key, commit_id, table_id, error_class, error)
    select r.*
    from unnest(
        %(commit_keys)s::uuid[], %(commit_ids)s::text[], %(table_ids)s::integer[], %(error_classes)s::text[],
        %(errors)s::text[]
    ) r
    where (select numbers from lost) is null
    on conflict (commit_key) do update set
        table_id = excluded.table_id, error_class = excluded.error_class, error = excluded.error,
        rejected_at = clock_timestamp()
)
select (select numbers from lost), durable.* from ({durably}) durable;

-- name: forget_rejected
-- Deletes the records of commits that were refused long ago.
delete from rejected_commit where rejected_at < clock_timestamp() - make_interval(secs => %(kept_seconds)s::float8);

-- name: dead_letters
-- Returns the last messages that could not be handled.
select queue, reason, receive_count, sent_at, buried_at, left(body, 200)
from dead_commit_message
order by buried_at desc
limit %(limit)s;
