-- Functions run no code of their callers with other rights. Each finds names in pg_catalog first, then in dormouse, and in
-- the session's temporary schema last. Only roles that need a function may execute it.

-- Gives a table that is partitioned by time the partition of a day, in UTC. Returns false when the table has it. Rows of
-- the day are moved from the default partition. It runs as its owner, so that roles that own no table can make days, too;
-- therefore it knows the tables that it serves, and names each object by its schema.
create or replace function dormouse.add_day(parent text, day date) returns boolean
language plpgsql security definer
set search_path = pg_catalog, dormouse, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    name text := format('%s_%s', parent, to_char(day, 'YYYYMMDD'));
    limits text := format('(%L) to (%L)', day::timestamptz, (day + 1)::timestamptz);
    whole regclass;
    clock text;
    spare text;
    is_known boolean;
begin
    -- the partitioned tables of this schema, by their ids; none that the caller has made
    select c.oid, a.attname, (select format('dormouse.%I', d.relname) from pg_class d where d.oid = t.partdefid)
    into whole, clock, spare
    from pg_class c
    join pg_partitioned_table t on t.partrelid = c.oid
    join pg_attribute a on a.attrelid = c.oid and a.attnum = t.partattrs[0]
    where c.relnamespace = 'dormouse'::regnamespace and c.relname = parent and parent in ('removal', 'payload', 'ended_job');
    if not found then
        raise insufficient_privilege using message = format('%L is no table of Dormouse that has a partition a day', parent);
    end if;
    -- others that make days wait; writers do only where their rows may have to be moved
    if spare is null then
        execute format('lock table only dormouse.%I in share update exclusive mode', parent);
    else
        execute format('lock table only dormouse.%I, %s in access exclusive mode', parent, spare);
    end if;
    select exists (
        select
        from pg_inherits i
        join pg_class c on c.oid = i.inhrelid
        where i.inhparent = whole and c.relname = name and c.relnamespace = 'dormouse'::regnamespace
    ) into is_known;
    if is_known then
        return false;
    end if;
    execute format('create table dormouse.%I (like dormouse.%I including all)', name, parent);
    if spare is not null then
        execute format(
            'with moved as (delete from %1$s where %2$I >= %3$L and %2$I < %4$L returning *)'
            ' insert into dormouse.%5$I select * from moved',
            spare, clock, day::timestamptz, (day + 1)::timestamptz, name
        );
    end if;
    execute format('alter table dormouse.%I attach partition dormouse.%I for values from %s', parent, name, limits);
    return true;
end
$$;

-- All functions of the schema, also those that mirror a day of payloads at this moment. Roles that may use the schema keep
-- what they could execute; only roles that may write the log of removals make days.
do $$
declare
    made record;
    grantee text;
begin
    for made in
        select p.oid, p.oid::regprocedure as signature, p.prosecdef, p.prorettype = 'trigger'::regtype as is_trigger
        from pg_proc p
        where p.pronamespace = 'dormouse'::regnamespace and p.prokind = 'f' and pg_has_role(p.proowner, 'usage')
    loop
        execute format('alter function %s set search_path = pg_catalog, dormouse, pg_temp', made.signature);
        execute format('revoke execute on function %s from public', made.signature);
        if not made.is_trigger then
            for grantee in
                select r.rolname
                from pg_namespace n, aclexplode(n.nspacl) g, pg_roles r
                where n.nspname = 'dormouse' and g.privilege_type = 'USAGE' and r.oid = g.grantee and r.oid <> n.nspowner
                    and (not made.prosecdef or has_table_privilege(r.oid, 'dormouse.removal', 'insert'))
            loop
                execute format('grant execute on function %s to %I', made.signature, grantee);
            end loop;
        end if;
    end loop;
end
$$;
