-- name: has_room
-- Whether the server has connections to spare: a pool keeps none of the last quarter for later.
select sum(numbackends) <= 0.75 * current_setting('max_connections')::integer from pg_stat_database;
