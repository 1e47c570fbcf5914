-- name: record
-- Records how a round ended.
insert into instance_round as r (kind, began_at, ended_at, error, well_at)
select %(kind)s, n.now - make_interval(secs => %(seconds)s), n.now, %(error)s::text,
    case when %(error)s::text is null then n.now end
from (select clock_timestamp() as now) n
on conflict (kind) do update set
    began_at = excluded.began_at,
    ended_at = excluded.ended_at,
    error = excluded.error,
    well_at = coalesce(excluded.well_at, r.well_at);

-- name: divide
-- Replaces a kind of rounds by others, which count as failed if it had failed.
with former as (
    delete from instance_round where kind = %(kind)s returning *
)
insert into instance_round (kind, began_at, ended_at, error, well_at)
select i.kind, f.began_at, f.ended_at, f.error, f.well_at
from former f, unnest(%(into)s::text[]) as i (kind)
where f.error is not null
on conflict (kind) do nothing;

-- name: rounds
-- Returns how the last round of each kind ended.
select kind, began_at, ended_at, error, well_at from instance_round order by kind;

-- name: is_due
-- Returns whether a round is due: some seconds after the last, or sooner after one that failed. A round that ended in the future
-- (the clock was set back since) does not count.
select not exists (
    select from instance_round
    where kind = %(kind)s
        and ended_at > clock_timestamp() - make_interval(
            secs => case when error is null then %(every_seconds)s else least(%(every_seconds)s, %(again_seconds)s) end
        )
        and ended_at < clock_timestamp() + interval '1 minute'
);

-- name: alone
-- Takes the right to maintain the instance, unless another process has it; the lock ends with the transaction.
select pg_try_advisory_xact_lock(7236154098213003);
