-- name: limit
-- Bounds a session by settings of milliseconds, where the server has them, unless its own are lower.
select set_config(s.name, l.milliseconds::text, false)
from unnest(%(names)s::text[], %(milliseconds)s::integer[]) l (name, milliseconds)
join pg_settings s on s.name = l.name and (s.setting = '0' or s.setting::integer > l.milliseconds);

-- name: look
-- Of a session that was just opened: whether the server has connections to spare, as a pool keeps none of the last
-- quarter for later; the process that answers; which settings did not come with the session.
select sum(numbackends) <= 0.75 * current_setting('max_connections')::integer, pg_backend_pid(),
    array(
        select name || ' = ' || value
        from unnest(%(names)s::text[], %(values)s::text[]) wanted (name, value)
        where current_setting(name) <> value
    )
from pg_stat_database;

-- name: scan
-- Has the statements of a session be planned as those that read much of a table, each for the sizes of now.
select set_config(name, 'on', false),
    set_config('work_mem', '64MB', false),
    set_config('plan_cache_mode', 'force_custom_plan', false)
from unnest(%(names)s::text[]) name;

-- name: hurry
-- Has the commits of a session not wait for the disk, and remembers what they would wait for.
select set_config('dormouse.durability', current_setting('synchronous_commit'), false),
    set_config('synchronous_commit', 'off', false);

-- name: durably
-- Part of a query: has its transaction wait for the disk as far as the server or the role asks; a write is part of it.
set_config(
    'synchronous_commit',
    coalesce(nullif(current_setting('dormouse.durability', true), ''), current_setting('synchronous_commit')),
    true
),
-- one that writes nothing does not wait; the log is one sequence, so all that was committed before goes with it
pg_logical_emit_message(true, 'dormouse', '')
