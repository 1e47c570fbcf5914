-- Ids of builds are never given twice. Those of an unlogged table's identity begin anew after a crash, when the tables of the
-- builds are still there, and in a database that is made again; placements of other tables may still have them.

alter table build alter column build_id drop identity;
do $$
begin
    execute format('create sequence build_number start %s', floor(extract(epoch from clock_timestamp()) * 1000));
end
$$;
alter table build alter column build_id set default nextval('build_number');
