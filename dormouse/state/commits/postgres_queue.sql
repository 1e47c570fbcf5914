-- name: send
-- Adds messages if the tables still have these names; returns whether a table has another name or was dropped.
with renamed as materialized (
    select
    from unnest(%(table_uuids)s::uuid[], %(names)s::text[]) as n (table_uuid, name)
    where not exists (select from tables t where t.table_uuid = n.table_uuid and t.name = n.name offset 0)
    limit 1
), sent as (
    insert into commit_message (queue, commit_key, body)
    select %(queue)s, commit_key, body
    from unnest(%(commit_keys)s::uuid[], %(bodies)s::text[]) as m (commit_key, body)
    where not exists (select from renamed)
)
select
    exists (select from renamed) as renamed,
    -- wakes committers that sleep, and only then: a notification takes a lock that makes commits wait for each other
    (
        select pg_notify(%(channel)s, '')::text
        from commit_waiter
        where queue = %(queue)s and waits_until > clock_timestamp()
        limit 1
    ) as woken;

-- name: receive
-- Takes visible messages, oldest first, that no other receiver is taking, and hides them for a while.
with taken as materialized (
    select ctid, visible_at, octet_length(body) as size
    from commit_message
    where queue = %(queue)s
        -- skips the index entries of messages that were received and are not vacuumed yet
        and visible_at >= %(since)s::timestamptz
        and visible_at <= statement_timestamp()
    order by visible_at
    limit %(limit)s
    for update skip locked
), fitting as (
    -- the first message, and those that fit beside it; the others are unlocked when this ends
    select ctid, visible_at
    from (
        select *, sum(size) over w as bytes, row_number() over w as number
        from taken
        window w as (order by visible_at, ctid rows unbounded preceding)
    ) t
    where number = 1 or bytes <= %(bytes_max)s
)
update commit_message m
set visible_at = clock_timestamp() + make_interval(secs => %(visibility_seconds)s),
    receive_count = m.receive_count + 1
from fitting,
    -- a message is received again if a crash undoes this, so the receiver need not wait for the disk
    (select set_config('synchronous_commit', 'off', true)) as quick
where m.ctid = fitting.ctid
returning fitting.visible_at, m.commit_key::text, m.message_id::text, m.receive_count, m.sent_at, m.body,
    extract(epoch from clock_timestamp() - m.sent_at)::float8;

-- name: undo_clock_jump
-- Shows messages that are hidden without having been received, or for too long: the clock was set back.
update commit_message
set visible_at = statement_timestamp()
where queue = %(queue)s
    and visible_at > statement_timestamp()
    and (receive_count = 0 or visible_at > statement_timestamp() + make_interval(secs => %(hidden_seconds_max)s));

-- name: places
-- Part of a query: the places (ctid) of messages, each only if its delivery is still the last one. A message that is
-- received again meanwhile has another place. "offset 0" forces one index look-up a message: after a burst the planner
-- believes that the queue is empty, and would read all of it.
select l.place
from unnest(%(commit_keys)s::uuid[], %(message_ids)s::uuid[], %(receive_counts)s::integer[])
    as d (commit_key, message_id, receive_count)
cross join lateral (
    select c.ctid as place
    from commit_message c
    where c.commit_key = d.commit_key and c.message_id = d.message_id and c.receive_count = d.receive_count
    offset 0
) l

-- name: is_last
-- Part of a query: true if the last delivery of message m is one of these. Servers before 17.7 and 18.1 find a row by its
-- place even if it was received again just before. "is true" makes the planner use a hash table.
((m.message_id, m.receive_count) in (
    select d.message_id, d.receive_count
    from unnest(%(message_ids)s::uuid[], %(receive_counts)s::integer[]) as d (message_id, receive_count)
)) is true

-- name: delete
-- Deletes messages, each only if its delivery is still the last one. A session that is younger than the messages keeps a
-- message whose commit is missing: the server may have crashed, or a standby that lacks the commit may have taken over.
delete from commit_message m
using
    -- a message is received again if a crash undoes this, and its commit is then found applied
    (select set_config('synchronous_commit', 'off', true)) as quick
where m.ctid = any(array({places})) and {is_last}
    and (
        %(is_same_server)s
        or exists (
            select from applied_commit c
            -- another table may have a commit with the same id
            where c.commit_key = m.commit_key and c.table_id = coalesce({table_of_message}, c.table_id)
            offset 0
        )
        or exists (select from rejected_commit r where r.commit_key = m.commit_key offset 0)
    );

-- name: retry_later
-- Hides messages for some seconds from now, each only if its delivery is still the last one.
update commit_message m
set visible_at = clock_timestamp() + make_interval(secs => %(seconds)s)
where m.ctid = any(array({places})) and {is_last};

-- name: send_again
-- Hides messages for some seconds from now and does not count the delivery; each only if it is still the last one.
update commit_message m
set visible_at = clock_timestamp() + make_interval(secs => %(seconds)s),
    -- at least 1: undo_clock_jump shows messages that are hidden and were never received
    receive_count = greatest(m.receive_count - 1, 1),
    message_id = gen_random_uuid()
where m.ctid = any(array({places})) and {is_last};

-- name: bury
-- Moves messages to the dead letters, each only if its delivery is still the last one.
with deleted as (
    delete from commit_message m
    where m.ctid = any(array({places})) and {is_last}
    returning m.*
)
insert into dead_commit_message (message_id, queue, commit_key, body, sent_at, receive_count, reason)
select message_id, queue, commit_key, body, sent_at, receive_count, %(reason)s
from deleted;

-- name: depth
-- Returns how many messages there are, counted up to a limit, and the age of the oldest of those counted, in seconds.
select count(*), coalesce(extract(epoch from clock_timestamp() - min(sent_at)), 0)::double precision
from (
    select sent_at
    from commit_message
    where queue = %(queue)s
    order by visible_at
    limit %(counted_max)s
) as counted;

-- name: listen
-- Subscribes this session to notifications of messages.
listen {channel};

-- name: unlisten
-- Ends all subscriptions of this session.
unlisten *;

-- name: announce
-- Records for senders that a committer sleeps; deletes the records of committers that died asleep.
with stale as (
    delete from commit_waiter
    where queue = %(queue)s
        and waits_until not between clock_timestamp() - interval '1 minute' and clock_timestamp() + interval '5 minutes'
)
insert into commit_waiter (queue, waiter, waits_until)
values (%(queue)s, %(waiter)s, clock_timestamp() + make_interval(secs => %(seconds)s));

-- name: leave
-- Deletes the record that a committer sleeps.
delete from commit_waiter where queue = %(queue)s and waiter = %(waiter)s;

-- name: rehome
-- Moves messages of queues that no longer exist to those that do.
update commit_message set queue = queue % %(queues)s::smallint where queue >= %(queues)s;
