-- name: lock
-- Waits until no other process brings this database up to date. The lock ends with the session, too.
-- A frozen process loses it: its session ends when it is silent for too long.
select pg_advisory_lock(7236154098213002), set_config('idle_session_timeout', %(idle_ms)s::text, false);

-- name: unlock
-- Lets the next process in.
select pg_advisory_unlock(7236154098213002);

-- name: next_xid
-- Returns the first transaction id that the database has not used.
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: make_roles
-- Makes the roles, with their memberships and their rights on the database.
do $$
declare
    name text;
    maker regprocedure;
begin
    foreach name in array array['dormouse_schema', 'dormouse_owner', 'dormouse_run', 'dormouse_read'] loop
        begin
            if to_regrole(name) is null then
                execute format('create role %I', name);
            end if;
        exception when duplicate_object or unique_violation then
            null;  -- another database of the server was faster
        end;
    end loop;
    -- superusers have 'usage' of every role
    if not pg_has_role('dormouse_schema', 'usage') then
        execute format('grant dormouse_schema to %I', current_user);
    end if;
    execute format('grant connect on database %I to dormouse_schema', current_database());
    -- no work of ours needs temporary tables, which other code may take for tables of the schema
    execute format('revoke temporary on database %I from public, dormouse_schema, dormouse_run', current_database());
    -- databases of PostgreSQL 14 and older let all roles make tables there
    if to_regnamespace('public') is not null and has_schema_privilege('public', 'public', 'create') then
        revoke create on schema public from public;
    end if;
    -- large objects belong to the role that makes them, and no table shows them; a service such as RDS owns these functions
    -- itself
    for maker in
        select p.oid::regprocedure
        from pg_proc p
        where p.pronamespace = 'pg_catalog'::regnamespace and p.proname in ('lo_creat', 'lo_create', 'lo_from_bytea')
            and pg_has_role(p.proowner, 'usage') and has_function_privilege('public', p.oid, 'execute')
    loop
        execute format('revoke execute on function %s from public', maker);
    end loop;
    if not pg_has_role('dormouse_owner', 'dormouse_schema', 'usage') then
        grant dormouse_schema to dormouse_owner;
    end if;
    foreach name in array array['dormouse_owner', 'dormouse_run', 'dormouse_read'] loop
        if not (select rolcanlogin from pg_roles where rolname = name) then
            execute format('alter role %I login', name);
        end if;
        execute format('grant connect on database %I to %I', current_database(), name);
        if to_regrole('rds_iam') is not null then
            if not pg_has_role(name::regrole, 'rds_iam', 'usage') then
                execute format('grant rds_iam to %I', name);
            end if;
        end if;
    end loop;
end
$$;

-- name: make_schema
-- Makes the schema for its owner, which then needs no right to make schemas.
do $$
begin
    if to_regnamespace('dormouse') is null then
        create schema dormouse authorization dormouse_schema;
    end if;
    execute format('revoke create on database %I from dormouse_schema', current_database());
end
$$;

-- name: set
-- Gives the sessions of a role in this database a setting.
alter role {role} in database {database} set {name} = {value};

-- name: owned_by_others
-- Returns statements that give the schema, and all in it, to the role that owns it; none if it owns all.
select statement
from (
    select 1 as step, 'alter schema dormouse owner to dormouse_schema' as statement
    from pg_namespace
    where nspname = 'dormouse' and nspowner <> 'dormouse_schema'::regrole
    union all
    select 2, format('alter table %s owner to dormouse_schema', c.oid::regclass)
    from pg_class c
    where c.relnamespace = to_regnamespace('dormouse') and c.relkind in ('r', 'p', 'v', 'm')
        and c.relowner <> 'dormouse_schema'::regrole
    union all
    -- a column's sequence changes its owner with the table
    select 3, format('alter sequence %s owner to dormouse_schema', c.oid::regclass)
    from pg_class c
    where c.relnamespace = to_regnamespace('dormouse') and c.relkind = 'S' and c.relowner <> 'dormouse_schema'::regrole
        and not exists (
            select from pg_depend d
            where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.refclassid = 'pg_class'::regclass
                and d.deptype in ('a', 'i')
        )
    union all
    select 3, format('alter routine %s owner to dormouse_schema', p.oid::regprocedure)
    from pg_proc p
    where p.pronamespace = to_regnamespace('dormouse') and p.proowner <> 'dormouse_schema'::regrole
) owned
order by step, statement;

-- name: grant
-- Grants the rights of the roles that read and write rows and that only read, also for tables that are made later.
grant usage on schema dormouse to dormouse_run;
grant select, insert, update, delete on all tables in schema dormouse to dormouse_run;
grant usage, select on all sequences in schema dormouse to dormouse_run;
revoke insert, update, delete on migration, instance from dormouse_run;
-- functions: granted to the roles that need them; an older release may have left others
alter default privileges revoke execute on functions from public;
revoke execute on all functions in schema dormouse from public, dormouse_run, dormouse_read;
grant execute on function await_messages, interval_fork, lock_rows, lost_race, not_whole, replayed_snapshot, this_database
    to dormouse_run;
-- it makes tables with the rights of its owner
grant execute on function add_day to dormouse_run;
-- they write, find and delete payloads with the rights of their owner; roles of applications get them by name
grant execute on function put_payload, put_payloads, find_payloads, delete_payloads to dormouse_run;
grant execute on function replayed_snapshot, this_database to dormouse_read;
alter default privileges in schema dormouse grant select, insert, update, delete on tables to dormouse_run;
alter default privileges in schema dormouse grant usage, select on sequences to dormouse_run;
grant usage on schema dormouse to dormouse_read;
grant select on all tables in schema dormouse to dormouse_read;
alter default privileges in schema dormouse grant select on tables to dormouse_read;

-- name: database
-- Returns a row if a database of this name exists.
select 1 from pg_catalog.pg_database where datname = %(name)s;

-- name: make_database
-- Makes another database of the server.
create database {database} template template0 encoding 'UTF8' locale 'C';

-- name: let_make_tables
-- Allows the role that writes rows to make everything in a database of indexes.
grant create, connect on database {database} to dormouse_run;
