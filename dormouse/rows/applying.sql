-- name: tables
-- Which of these names are tables.
select name from tables where name = any(%(names)s);
