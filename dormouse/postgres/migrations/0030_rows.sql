-- Row tables: which version each row has now, what was changed by whom, and who may change it.

-- tables of which the rows are edited
create table row_table (
    table_id integer constraint row_table_pkey primary key references tables on delete cascade,
    -- the id of the next row that is inserted
    next_id bigint not null default 1,
    -- the newest version; 0: nothing was ever changed
    version bigint not null default 0,
    changed_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- their columns, from a version on
create table row_columns (
    table_id integer not null references row_table on delete cascade,
    since_version bigint not null,
    -- a list of objects: column_id (that of the schema's column), name, type, size_max, default, enum
    columns jsonb not null,
    constraint row_columns_pkey primary key (table_id, since_version)
);

-- the versions that rows have now: disjoint ranges of ids, one for the rows that one block inserted
-- (no foreign keys below: a change of many rows would look one up for each)
create table row_range (
    table_id integer not null,
    first_id bigint not null,
    last_id bigint not null,
    version bigint not null,
    -- the version is that of a deletion
    is_deleted boolean not null default false,
    constraint row_range_pkey primary key (table_id, first_id),
    constraint row_range_filled check (last_id >= first_id)
);
-- what was changed after a version
create index row_range_version on row_range (table_id, version);

-- the changes, for people
create table row_change (
    table_id integer not null,
    first_version bigint not null,
    last_version bigint not null,
    changed_at timestamptz not null default clock_timestamp(),
    changed_by text not null,
    -- of the first row that it inserted
    first_id bigint not null,
    inserted bigint not null,
    updated bigint not null,
    deleted bigint not null,
    unchanged bigint not null,
    -- what it did to the columns
    columns_changed text[] not null,
    constraint row_change_pkey primary key (table_id, last_version)
);
-- what a change was asked as, so that the same is told when it is asked again
create table row_change_id (
    table_id integer not null,
    change_id text collate "C" not null,
    last_version bigint not null,
    constraint row_change_id_pkey primary key (table_id, change_id)
);

create table row_snapshot (
    table_id integer not null,
    name text collate "C" not null,
    version bigint not null,
    taken_at timestamptz not null default clock_timestamp(),
    constraint row_snapshot_pkey primary key (table_id, name)
);

-- many readers or one writer of a table, each until its lease is over; the token fences
create table row_lock (
    table_id integer not null,
    token uuid not null,
    -- precursor: a writer that waits for the readers, and lets nobody else in
    kind text collate "C" not null constraint row_lock_kind_known check (kind in ('read', 'write', 'precursor')),
    holder text not null,
    leased_until timestamptz not null,
    constraint row_lock_pkey primary key (table_id, token)
) with (fillfactor = 50);

create function forget_rows() returns trigger language plpgsql as $$
begin
    delete from row_range where table_id = old.table_id;
    delete from row_change where table_id = old.table_id;
    delete from row_change_id where table_id = old.table_id;
    delete from row_snapshot where table_id = old.table_id;
    delete from row_lock where table_id = old.table_id;
    return null;
end
$$;
create trigger row_table_forgotten after delete on row_table for each row execute function forget_rows();

-- Takes a lock, or says who stands in the way. One at a time for a table: each statement of it sees what those before did.
-- state: granted; waits (a precursor stands, for this token, until the readers have gone); held; gone (no such table).
create function lock_rows(of_table integer, wanted text, own_token uuid, own_holder text, lease_seconds double precision)
returns table (state text, kind text, holder text, leased_until timestamptz, version bigint, next_id bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    found_version bigint;
    found_next bigint;
    other row_lock;
    got text := case when wanted = 'read' then 'read' else 'write' end;
begin
    select r.version, r.next_id into found_version, found_next from row_table r where r.table_id = of_table for update;
    if not found then
        return query select 'gone', null::text, null::text, null::timestamptz, null::bigint, null::bigint;
        return;
    end if;
    delete from row_lock l where l.table_id = of_table and l.leased_until < clock_timestamp();
    select l.* into other from row_lock l
    where l.table_id = of_table and l.token <> own_token and l.kind <> 'read';
    if not found and wanted = 'write' then
        select l.* into other from row_lock l
        where l.table_id = of_table and l.token <> own_token
        order by l.leased_until desc limit 1;
        if found then
            got := 'precursor';
        end if;
    elsif found then
        return query select 'held', other.kind, other.holder, other.leased_until, found_version, found_next;
        return;
    end if;
    insert into row_lock as l (table_id, token, kind, holder, leased_until)
    values (of_table, own_token, got, own_holder, clock_timestamp() + make_interval(secs => lease_seconds))
    on conflict on constraint row_lock_pkey do update set kind = excluded.kind, leased_until = excluded.leased_until;
    return query select
        case when got = 'precursor' then 'waits' else 'granted' end, other.kind, other.holder, other.leased_until,
        found_version, found_next;
end
$$;
