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
    database_oid oid not null,
    -- of Aurora, by its endpoint: a clone may have all else of the original
    cluster text collate "C"
);

-- What tells a database from its copies; 0 for what a managed PostgreSQL does not say.
create function this_database(out system_identifier bigint, out timeline integer, out database_oid oid)
language plpgsql stable as $$
begin
    select d.oid into database_oid from pg_database d where d.datname = current_database();
    system_identifier := 0;
    timeline := 0;
    begin
        select s.system_identifier into system_identifier from pg_control_system() s;
        select c.timeline_id into timeline from pg_control_checkpoint() c;
    exception when insufficient_privilege or feature_not_supported or undefined_function then
        null;
    end;
end
$$;
