-- Payloads that an application finds and deletes in its own transaction. As `put_payloads`, these functions run as their owner:
-- the role of an application needs EXECUTE on them and USAGE on the schema, and no right to a table. PUBLIC has neither.

-- Checks the keys that an application gives. Only the functions below call it. Fails with
--   22023  an array has another length, a part of a key is null, empty or too long, or a kind is Dormouse's own
--   DM003  `instance` is given, and this is the database of another instance
create function dormouse.check_payload_keys(tenants text[], ids text[], times timestamptz[], kinds text[], instance uuid) returns void
language plpgsql set search_path = pg_catalog, dormouse, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    wrong record;
begin
    if instance is not null and not exists (select from dormouse.instance i where i.instance_id = instance) then
        raise exception using errcode = 'DM003', message = 'this database is not the one of the instance: give a connection to that';
    end if;
    select g.*, f.fault into wrong
    from unnest(tenants, ids, times, kinds) g (tenant, id, inserted_at, kind),
        lateral (
            select case
                when num_nulls(g.tenant, g.id, g.inserted_at, g.kind) > 0 then 'a part of its key is null'
                when '' in (g.tenant, g.id, g.kind) then 'a part of its key is empty'
                when greatest(octet_length(g.tenant), octet_length(g.id), octet_length(g.kind)) > 512
                    then 'tenant, id and kind may have 512 bytes each'
                when g.kind like 'dormouse.%' then 'kinds that begin with dormouse. are for jobs of Dormouse'
                when g.inserted_at not between '0001-01-01 00:00:00+00' and '9999-12-31 23:59:59.999999+00'
                    then 'inserted_at must be of the years 1 to 9999'
            end as fault
        ) f
    where f.fault is not null
    limit 1;
    if found then
        raise exception using errcode = '22023', message = format(
            'payload %s %L of tenant %L at %s: %s', left(wrong.kind, 80), left(wrong.id, 80), left(wrong.tenant, 80),
            wrong.inserted_at, wrong.fault
        );
    end if;
end
$$;

-- Returns a row for each key, by its number from 1: whether its day was dropped, and the content or the place in an object. A key
-- without a payload has nulls. It is volatile, so that each of its statements sees what is committed when it has the day's lock.
create function dormouse.find_payloads(
    tenants text[], ids text[], times timestamptz[], kinds text[], instance uuid default null
) returns table (
    number bigint, expired boolean, location text, content text, object_key text, byte_start bigint, byte_length integer,
    checksum bytea, dictionaries text, index_start bigint, byte_count bigint
)
language plpgsql security definer
set search_path = pg_catalog, dormouse, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    of_day record;
begin
    perform dormouse.check_payload_keys(tenants, ids, times, kinds, instance);
    for of_day in
        select g.day, format('payload_%s', to_char(g.day, 'YYYYMMDD')) as name, array_agg(g.n) as numbers
        from (select (t at time zone 'UTC')::date as day, n from unnest(times) with ordinality u (t, n)) g
        group by g.day
        order by g.day
    loop
        if to_regclass(format('dormouse.%I', of_day.name)) is null then
            return query
                select n, exists (select from dormouse.payload_day d where d.day = of_day.day and d.state = 'expired'),
                    null::text, null::text, null::text, null::bigint, null::integer, null::bytea, null::text, null::bigint,
                    null::bigint
                from unnest(of_day.numbers) n;
            continue;
        end if;
        return query execute format(
            'select given.number, false, p.location, p.content::text, coalesce(p.object_key, b.object_key), p.byte_start,'
            '   p.byte_length, p.checksum, coalesce(o.dictionaries, b.dictionaries)::text, b.index_start, b.byte_count'
            ' from unnest($1, $2, $3, $4) with ordinality given (tenant, id, inserted_at, kind, number)'
            ' left join dormouse.%I p'
            '   on (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at)'
            ' left join dormouse.payload_object o on o.object_key = p.object_key'
            ' left join lateral ('
            '   select *'
            '   from dormouse.payload_object'
            '   where p.location is null and day = $5 and state = ''block'''
            '     and (last_kind, last_tenant, last_id, last_at)'
            '       >= (given.kind, given.tenant, given.id, given.inserted_at)'
            '   order by last_kind, last_tenant, last_id, last_at'
            '   limit 1'
            ' ) b on (b.first_kind, b.first_tenant, b.first_id, b.first_at)'
            '   <= (given.kind, given.tenant, given.id, given.inserted_at)'
            ' where (given.inserted_at at time zone ''UTC'')::date = $5',
            of_day.name
        ) using tenants, ids, times, kinds, of_day.day;
    end loop;
end
$$;

-- Deletes the payloads that are there; where the blocks of a day may have them, records that they are deleted.
create function dormouse.delete_payloads(
    tenants text[], ids text[], times timestamptz[], kinds text[], instance uuid default null
) returns void
language plpgsql security definer
set search_path = pg_catalog, dormouse, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    of_day record;
begin
    perform dormouse.check_payload_keys(tenants, ids, times, kinds, instance);
    for of_day in
        select (t at time zone 'UTC')::date as day, format('payload_%s', to_char(t at time zone 'UTC', 'YYYYMMDD')) as name
        from unnest(times) t
        group by 1, 2
        order by 1
    loop
        continue when to_regclass(format('dormouse.%I', of_day.name)) is null;
        execute format(
            'delete from dormouse.%I p'
            ' using unnest($1, $2, $3, $4) given (tenant, id, inserted_at, kind)'
            ' where (p.kind, p.tenant, p.id, p.inserted_at) = (given.kind, given.tenant, given.id, given.inserted_at)',
            of_day.name
        ) using tenants, ids, times, kinds;
        -- after the lock of the statement above, this one sees whether the day has blocks
        execute format(
            'insert into dormouse.%I (kind, tenant, id, inserted_at, location)'
            ' select distinct kind collate "C", tenant collate "C", id collate "C", inserted_at, ''deleted'''
            ' from unnest($1, $2, $3, $4) given (tenant, id, inserted_at, kind)'
            ' where (inserted_at at time zone ''UTC'')::date = $5'
            '   and exists (select from dormouse.payload_day where day = $5 and state in (''folding'', ''folded''))'
            ' order by 1, 2, 3, 4'
            ' on conflict (kind, tenant, id, inserted_at) do update'
            ' set location = ''deleted'', content = null, object_key = null, byte_start = null, byte_length = null,'
            '   checksum = null',
            of_day.name
        ) using tenants, ids, times, kinds, of_day.day;
    end loop;
end
$$;

revoke execute on function dormouse.check_payload_keys, dormouse.find_payloads, dormouse.delete_payloads from public;
