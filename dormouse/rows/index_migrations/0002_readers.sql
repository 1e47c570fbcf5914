-- In a deployment who only reads has a role of its own, and reads indexes.
do $$
begin
    if to_regrole('dormouse_read') is not null then
        grant usage on schema dormouse to dormouse_read;
        grant select on all tables in schema dormouse to dormouse_read;
        alter default privileges in schema dormouse grant select on tables to dormouse_read;
    end if;
end
$$;
