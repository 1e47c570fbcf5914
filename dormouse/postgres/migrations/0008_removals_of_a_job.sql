-- The log of removals has a row for each job and partition instead of one for each reference.

create table removal (
    table_id integer not null,
    partition_id text collate "C" not null,
    -- one element a reference, as they are named in file_reference
    file_ids uuid[] not null,
    row_counts bigint[] not null,
    counts_approximate boolean[] not null,
    only_contain_data_for_this_partition boolean[] not null,
    added_xids xid8[] not null,
    ingested boolean[] not null,
    removed_xid xid8 not null default pg_current_xact_id(),
    removed_at timestamptz not null default clock_timestamp()
) partition by range (removed_at);
-- ids do not compress, and of long arrays nothing else is worth the try
alter table removal alter column file_ids set storage external, alter column added_xids set storage external;
-- a table's removals since a snapshot
create index removal_since on removal (table_id, removed_xid);
-- takes what no day's partition was made for in time, so that no removal ever fails
create table removal_default partition of removal default;

do $$
declare
    day record;
begin
    for day in
        select replace(c.relname, 'removed_reference', 'removal') as name, pg_get_expr(c.relpartbound, c.oid) as bounds
        from pg_inherits i
        join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'dormouse.removed_reference'::regclass and c.relname <> 'removed_reference_default'
    loop
        execute format('create table dormouse.%I partition of dormouse.removal %s', day.name, day.bounds);
    end loop;
end
$$;

insert into removal
select table_id, partition_id, array_agg(file_id), array_agg(row_count), array_agg(count_approximate),
    array_agg(only_contains_data_for_this_partition), array_agg(added_xid), array_agg(ingested), removed_xid,
    min(removed_at)
from removed_reference
group by table_id, partition_id, removed_xid, (removed_at at time zone 'UTC')::date;

drop table removed_reference;

create trigger removal_cleared after delete on removal for each statement execute function void_totals();

-- For an older Dormouse that still runs: its removals go where all go, and it reads those of others.

create view removed_reference as
select g.table_id, g.partition_id, r.*, g.removed_xid, g.removed_at
from removal g
cross join lateral unnest(
    g.file_ids, g.row_counts, g.counts_approximate, g.only_contain_data_for_this_partition, g.added_xids, g.ingested
) as r (file_id, row_count, count_approximate, only_contains_data_for_this_partition, added_xid, ingested);

create function log_removed_reference() returns trigger language plpgsql as $$
begin
    insert into dormouse.removal (table_id, partition_id, file_ids, row_counts, counts_approximate,
        only_contain_data_for_this_partition, added_xids, ingested)
    values (new.table_id, new.partition_id, array[new.file_id], array[new.row_count], array[new.count_approximate],
        array[new.only_contains_data_for_this_partition], array[new.added_xid], array[coalesce(new.ingested, true)]);
    return new;
end
$$;
create trigger removed_reference_logged instead of insert on removed_reference
    for each row execute function log_removed_reference();

-- it deletes only all removals of a table, when that is cleared
create function forget_removed_reference() returns trigger language plpgsql as $$
begin
    delete from dormouse.removal
    where table_id = old.table_id and removed_xid = old.removed_xid and partition_id = old.partition_id;
    return old;
end
$$;
create trigger removed_reference_forgotten instead of delete on removed_reference
    for each row execute function forget_removed_reference();

create trigger removed_reference_cleared after delete on removed_reference
    for each statement execute function void_totals();

-- it finds that another makes the days of the log, as when it comes too late
create view removed_reference_default as select * from removed_reference where false;
create function leave_days_to_others() returns trigger language plpgsql as $$
begin
    raise undefined_table using message = 'a newer Dormouse keeps the log of removals';
end
$$;
create trigger removed_reference_default_left before delete on removed_reference_default
    for each statement execute function leave_days_to_others();
-- without one for rows, those of the view below would be asked
create trigger removed_reference_default_kept instead of delete on removed_reference_default
    for each row execute function leave_days_to_others();
