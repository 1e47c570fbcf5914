-- name: tables
-- The names among the given ones that tables have.
select name from tables where name = any(%(names)s);
