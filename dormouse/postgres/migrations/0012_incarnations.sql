-- Which database may write into the object store: the one that made the store's last incarnation.

create table incarnation (
    number bigint constraint incarnation_pkey primary key constraint incarnation_counts check (number >= 0),
    incarnation_id uuid not null default gen_random_uuid(),
    made_at timestamptz not null default clock_timestamp(),
    -- 'copy': a database without incarnations that was found in another cluster than the one it was made in
    reason text not null
        constraint incarnation_reason_known check (reason in ('made', 'start', 'adoption', 'copy')),
    -- whether the store has it, too
    confirmed boolean not null default false,
    -- the database that it was made in: what a copy has otherwise
    system_identifier bigint not null,
    timeline integer not null,
    database_oid oid not null
);
