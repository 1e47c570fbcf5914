-- name: look
-- Checks a session that was just opened, and sets its limits. Returns whether the server has connections to spare (a pool keeps
-- none of the last quarter for later), the process that answers, the settings that the session does not have, and the limits
-- that the role or the server gave it (null for a limit that the server does not know). Limits are set where ours are lower,
-- unless a pooler shares the session.
with own as materialized (
    select n, name, wanted, (1000 * extract(epoch from current_setting(name, true)::interval))::integer as found
    from unnest(%(limits)s::text[], %(milliseconds)s::integer[]) with ordinality l (name, wanted, n)
), bounded as materialized (
    select n, found, case
            when wanted > 0 and (found = 0 or found > wanted) and pg_backend_pid() = %(process_id)s
                then set_config(name, wanted::text, false)
        end
    from own
)
select sum(numbackends) <= 0.75 * current_setting('max_connections')::integer, pg_backend_pid(),
    array(
        select name || ' = ' || value
        from unnest(%(names)s::text[], %(values)s::text[]) wanted (name, value)
        where current_setting(name) <> value
            -- the order of day and month says nothing about how dates are written
            and not (name = 'datestyle' and current_setting(name) like 'ISO%%')
    ),
    array(select found from bounded order by n)
from pg_stat_database;

-- name: scan
-- Makes the planner treat the session's statements as those that read much of a table, each planned for the present sizes.
select set_config(name, 'on', false),
    set_config('work_mem', '64MB', false),
    set_config('plan_cache_mode', 'force_custom_plan', false)
from unnest(%(names)s::text[]) name;

-- name: hurry
-- Makes the commits of a session not wait for the disk, and remembers the setting for those that must.
select set_config('dormouse.durability', current_setting('synchronous_commit'), false),
    set_config('synchronous_commit', 'off', false);

-- name: durably
-- Makes this transaction wait for the disk as the server or the role asks. It also writes a message, for the reason below.
select set_config(
        'synchronous_commit',
        coalesce(nullif(current_setting('dormouse.durability', true), ''), current_setting('synchronous_commit')),
        true
    ),
    -- a transaction that writes nothing does not wait; the log is one sequence, so earlier commits are safe with it
    pg_logical_emit_message(true, 'dormouse', '')
