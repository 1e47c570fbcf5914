-- Who waits for a commit waits in the server: each look of a client's costs more than a hundred of these.

create function await_messages(commit_keys uuid[], seconds double precision) returns void language plpgsql as $$
declare
    over timestamptz := clock_timestamp() + make_interval(secs => seconds);
    pause double precision := 0.001;
begin
    -- until one of them is gone
    while clock_timestamp() < over and not exists (
        select from unnest(commit_keys) as k
        where not exists (select from dormouse.commit_message m where m.commit_key = k)
    ) loop
        perform pg_sleep(pause);
        pause := least(2 * pause, 0.02);
    end loop;
end
$$;
