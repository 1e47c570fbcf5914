-- name: may_roll
-- Returns whether the session may drop partitions of a table.
select pg_has_role(relowner, 'usage') from pg_class where oid = %(table)s::regclass;

-- name: today
-- Returns the present day, by the clock that dates rows.
select (clock_timestamp() at time zone 'UTC')::date;

-- name: partition_days
-- Returns the days that a table has a partition for.
select to_date(right(c.relname, 8), 'YYYYMMDD')
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = %(table)s::regclass and c.relname ~ '_\d{8}$'
order by 1;

-- name: add_day
-- Makes the partition of a day unless it exists.
select add_day(%(table)s, %(day)s);

-- name: drop_day
-- Drops the partition of one day.
drop table {day};
