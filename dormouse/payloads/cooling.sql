-- name: expire
-- Notes that a day is dropped, and that nobody works on it any more; no row: somebody does, or it is dropped already, and
-- nobody has made its partition again.
insert into payload_day as d (day, state) values (%(day)s, 'expired')
on conflict (day) do update
set state = 'expired', work = null, phase = null, token = d.token + 1, worker = null, leased_until = null, after_kind = null,
    after_tenant = null, after_id = null, after_at = null, verified_till = null, error = null, failed_at = null,
    changed_at = clock_timestamp()
where (d.state <> 'expired' or to_regclass(%(name)s) is not null) and (d.worker is null or d.leased_until < clock_timestamp())
returning day;

-- name: drop_work
-- Drops what work on a day that was not done has left.
drop table if exists {copy}, {written}, {old};

-- name: drop_mirror
-- Drops the function of a trigger that is gone with its table.
drop function if exists {mirror}();

-- name: is_partition
-- Whether a day has a partition.
select to_regclass(%(name)s) is not null;
