-- Clock jumps that were found, and what tells a worker that died from one that the database did not hear for a while.

-- each time that leases and other times were found further ahead of the database's clock than they can be: it had been ahead,
-- and went back
create table clock_jump (
    jump_id bigint generated always as identity constraint clock_jump_pkey primary key,
    found_at timestamptz not null default clock_timestamp(),
    -- how far the clock went back, at least
    seconds double precision not null,
    -- leases that were given under the wrong clock, and last from now on for as long as they always do
    leases bigint not null,
    -- other times of the wrong clock that were set to now
    times bigint not null
);

alter table job_worker
    -- how long a renewal of the lease lasts while jobs run; null: registered by an older version
    add column lease_seconds double precision,
    -- when another worker found that the lease was over; before lease_until it tells nothing, as the lease was renewed since
    add column suspected_at timestamptz,
    -- since when the worker has had no connection; null: it has one
    add column asleep_since timestamptz;

-- the workers that are counted in `deaths`: one that turns out to live is taken off
alter table job add column dead_workers uuid[] not null default '{}';
