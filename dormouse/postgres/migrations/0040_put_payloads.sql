-- Payloads in the transaction of an application. Both functions run as their owner, so that the role of an application needs
-- EXECUTE on them and USAGE on the schema, and no right to a table. PUBLIC has neither.

-- Keeps payloads in place of those of the same keys; of one key, the last. The arrays have one element a payload. With `instance`,
-- fails in the database of another instance. Fails with
--   22023  an argument is null, empty or too long, a time that no reader can read, JSON that no reader can read, or a kind that
--          is Dormouse's own
--   DM002  the day of a payload was dropped
--   DM003  this is the database of another instance
create function dormouse.put_payloads(
    tenants text[], ids text[], times timestamptz[], kinds text[], contents jsonb[], instance uuid default null
) returns void
language plpgsql security definer
set search_path = pg_catalog, dormouse, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    given record;
    of_day record;
    size bigint;
    fault text;
begin
    if instance is not null and not exists (select from dormouse.instance i where i.instance_id = instance) then
        raise exception using errcode = 'DM003', message = 'this database is not the one of the instance: give a connection to that';
    end if;
    for given in
        select * from unnest(tenants, ids, times, kinds, contents) g (tenant, id, inserted_at, kind, content)
    loop
        fault := case
            when num_nulls(given.tenant, given.id, given.inserted_at, given.kind) > 0 then 'a part of its key is null'
            when '' in (given.tenant, given.id, given.kind) then 'a part of its key is empty'
            when greatest(octet_length(given.tenant), octet_length(given.id), octet_length(given.kind)) > 512
                then 'tenant, id and kind may have 512 bytes each'
            when given.kind like 'dormouse.%' then 'kinds that begin with dormouse. are for jobs of Dormouse'
            when given.inserted_at not between '0001-01-01 00:00:00+00' and '9999-12-31 23:59:59.999999+00'
                then 'inserted_at must be of the years 1 to 9999'
            when given.content is null then 'content is null; the payload null is ''null''::jsonb'
        end;
        if fault is null then
            size := octet_length(given.content::text);
            fault := case
                when size <= 1000 then null  -- too short for what follows; most are
                when size > 67108864
                    then format('it has %s bytes of JSON, and 67108864 are the most: divide it', size)
                when given.content @? 'strict $.**{500 to last} ? (@.type() == "array" || @.type() == "object")'
                    then 'it nests more than 500 arrays and objects in each other'
            end;
        end if;
        if fault is null and size > 309
            and given.content @? 'strict $.** ? (@.type() == "number" && (@ > 1.7e308 || @ < -1.7e308))'
            and (
                -- a number with a point, which no text has here, is read as a double; Python reads no more digits of a whole one
                regexp_replace(given.content::text, '"([^"\\]|\\.)*"', '""', 'g') ~ '[0-9]{200}[0-9]{109,}[.]'
                or given.content @? 'strict $.** ? (@.type() == "number" && (@ >= 1e4300 || @ <= -1e4300))'
            )
        then
            fault := 'it has a number that is too large for its readers';
        end if;
        if fault is not null then
            raise exception using errcode = '22023', message = format(
                'payload %s %L of tenant %L at %s: %s', left(given.kind, 80), left(given.id, 80), left(given.tenant, 80),
                given.inserted_at, fault
            );
        end if;
    end loop;
    for of_day in
        select (t at time zone 'UTC')::date as day, format('payload_%s', to_char(t at time zone 'UTC', 'YYYYMMDD')) as name
        from unnest(times) t
        group by 1, 2
        order by 1
    loop
        -- asked of the catalog, and not by an exception, which would give each call a subtransaction
        if to_regclass(format('dormouse.%I', of_day.name)) is null then
            if not exists (select from dormouse.payload_day d where d.day = of_day.day and d.state = 'expired') then
                begin
                    perform dormouse.add_day('payload', of_day.day);
                exception when duplicate_table then
                    null;  -- made since the snapshot of this transaction
                end;
            end if;
            if exists (select from dormouse.payload_day d where d.day = of_day.day and d.state = 'expired') then
                raise exception using errcode = 'DM002',
                    message = format('payloads of %s are past their retention, and were dropped', of_day.day);
            end if;
        end if;
        execute format(
            'insert into dormouse.%I (kind, tenant, id, inserted_at, content)'
            ' select distinct on (kind, tenant, id, inserted_at) kind, tenant, id, inserted_at, content'
            ' from ('
            '   select kind collate "C", tenant collate "C", id collate "C", inserted_at, content, number'
            '   from unnest($1, $2, $3, $4, $5) with ordinality g (tenant, id, inserted_at, kind, content, number)'
            '   where (inserted_at at time zone ''UTC'')::date = $6'
            ' ) g'
            ' order by kind, tenant, id, inserted_at, number desc'
            ' on conflict (kind, tenant, id, inserted_at) do update'
            ' set location = ''inline'', content = excluded.content, object_key = null, byte_start = null,'
            '   byte_length = null, checksum = null',
            of_day.name
        ) using tenants, ids, times, kinds, contents, of_day.day;
    end loop;
end
$$;

-- Keeps one payload, as `put_payloads` does.
create function dormouse.put_payload(tenant text, id text, inserted_at timestamptz, kind text, content jsonb) returns void
language plpgsql security definer set search_path = pg_catalog, dormouse, pg_temp as $$
begin
    perform dormouse.put_payloads(array[tenant], array[id], array[inserted_at], array[kind], array[content]);
end
$$;

revoke execute on function dormouse.put_payloads, dormouse.put_payload from public;
