-- A look for messages is a look-up for each, also where vacuum has seen their table empty.

create or replace function await_messages(commit_keys uuid[], usual double precision, seconds double precision)
returns integer
language plpgsql as $$
declare
    over timestamptz := clock_timestamp() + make_interval(secs => seconds);
    pause double precision := usual;
    looks integer := 0;
begin
    -- until one of them is gone
    while clock_timestamp() < over and not exists (
        select from unnest(commit_keys) as k
        where not exists (select from dormouse.commit_message m where m.commit_key = k offset 0)
    ) loop
        perform pg_sleep(least(pause, seconds));
        looks := looks + 1;
        pause := case looks when 1 then greatest(usual / 4, 0.002) else 1.5 * pause end;
    end loop;
    return looks;
end
$$;
