-- name: own_session
-- The process that answers, and when it began, as process ids are given again.
select pid, backend_start from pg_stat_activity where pid = pg_backend_pid();

-- name: end_session
-- Ends a session that this process had and lost, if the server has not noticed that yet; waits for its end.
select pg_terminate_backend(pid, 5000)
from pg_stat_activity
where pid = %(pid)s and backend_start = %(began)s and pid <> pg_backend_pid();
