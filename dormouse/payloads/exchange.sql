-- name: make_copy
-- Makes an empty copy of a day, with a check of the partition's bounds, and a table that lists the writes meanwhile.
drop table if exists {copy}, {written};
create table {copy} (like {day} including all);
alter table {copy} add constraint {bounds} check (inserted_at >= {from_day}::timestamptz and inserted_at < {to_day}::timestamptz);
create table {written} (
    kind text collate "C" not null, tenant text collate "C" not null, id text collate "C" not null,
    inserted_at timestamptz not null, xid xid8 not null default pg_current_xact_id()
);
create index on {written} (xid);

-- name: likeness
-- Statements that copy what `like` leaves out: the options, also of the TOAST table, the owner and the grants.
select format('alter table %I set (%s)', %(copy)s::text, string_agg(option, ', '))
from (
    select unnest(reloptions) as option from pg_class where oid = %(day)s::regclass
    union all
    select 'toast.' || unnest(t.reloptions)
    from pg_class c
    join pg_class t on t.oid = c.reltoastrelid
    where c.oid = %(day)s::regclass
) options
having count(*) > 0
union all
select format('alter table %I owner to %I', %(copy)s::text, pg_get_userbyid(c.relowner))
from pg_class c
join pg_class made on made.oid = %(copy)s::regclass
where c.oid = %(day)s::regclass and c.relowner <> made.relowner
union all
select format(
    'grant %s on %I to %s%s', g.privilege_type, %(copy)s::text,
    case when g.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(g.grantee)) end,
    case when g.is_grantable then ' with grant option' else '' end
)
from pg_class c, aclexplode(c.relacl) g
where c.oid = %(day)s::regclass and g.grantee <> c.relowner;

-- name: mirror
-- Makes a trigger that mirrors every write to a day to its copy, in the same transaction. A deleted row stays in the copy,
-- marked as deleted, so that the worker that copies older rows does not insert it again. The function runs as its owner,
-- because writers have no right to the copy. No other role can use it for a trigger, and it accepts only tables of this
-- schema, in which only the owner can create tables.
create or replace function dormouse.{mirror}() returns trigger
language plpgsql security definer set search_path = pg_catalog, dormouse, pg_temp as $$
begin
    if tg_table_schema <> 'dormouse' then
        raise insufficient_privilege using message = 'only a day of payloads is mirrored';
    end if;
    if tg_op = 'DELETE'
        or tg_op = 'UPDATE' and (old.kind, old.tenant, old.id, old.inserted_at) <> (new.kind, new.tenant, new.id, new.inserted_at)
    then
        insert into dormouse.{written} (kind, tenant, id, inserted_at) values (old.kind, old.tenant, old.id, old.inserted_at);
        insert into dormouse.{copy} (kind, tenant, id, inserted_at, location)
        values (old.kind, old.tenant, old.id, old.inserted_at, 'deleted')
        on conflict (kind, tenant, id, inserted_at) do update
        set location = 'deleted', content = null, object_key = null, byte_start = null, byte_length = null, checksum = null;
    end if;
    if tg_op <> 'DELETE' then
        insert into dormouse.{written} (kind, tenant, id, inserted_at) values (new.kind, new.tenant, new.id, new.inserted_at);
        insert into dormouse.{copy} values (new.*)
        on conflict (kind, tenant, id, inserted_at) do update
        set location = excluded.location, content = excluded.content, object_key = excluded.object_key,
            byte_start = excluded.byte_start, byte_length = excluded.byte_length, checksum = excluded.checksum;
    end if;
    return null;
end
$$;
revoke execute on function dormouse.{mirror}() from public;
create or replace trigger payload_mirror after insert or update or delete on dormouse.{day}
for each row execute function dormouse.{mirror}();
alter table dormouse.{day} enable always trigger payload_mirror;

-- name: snapshot
-- The current snapshot.
select pg_current_snapshot()::text;

-- name: note_seen
-- Records the snapshot up to which writes are compared. Later writes are compared before the exchange.
update payload_day set verified_till = coalesce(%(till)s::pg_snapshot, pg_current_snapshot()) where day = %(day)s;

-- name: count_written
-- The number of writes since a snapshot, counted up to a limit.
select count(*)
from (
    select
    from {written}
    where xid >= pg_snapshot_xmin(%(since)s::pg_snapshot) and not pg_visible_in_snapshot(xid, %(since)s::pg_snapshot)
    limit %(limit)s
) w;

-- name: forget_deleted
-- Deletes rows of the copy that are marked as deleted, among those written since a snapshot. All must be copied before.
delete from {copy} c
using {written} w
where (c.kind, c.tenant, c.id, c.inserted_at) = (w.kind, w.tenant, w.id, w.inserted_at) and c.location = 'deleted'
    and w.xid >= pg_snapshot_xmin(%(since)s::pg_snapshot) and not pg_visible_in_snapshot(w.xid, %(since)s::pg_snapshot);

-- name: last_of_page
-- The last key of a page of a day, and the number of its rows.
select last_value(kind) over w, last_value(tenant) over w, last_value(id) over w, last_value(inserted_at) over w, count(*) over w
from (
    select kind, tenant, id, inserted_at
    from {day}
    where %(after_kind)s::text is null
        or (kind, tenant, id, inserted_at) > (%(after_kind)s::text, %(after_tenant)s::text, %(after_id)s::text, %(after_at)s::timestamptz)
    order by kind, tenant, id, inserted_at
    limit %(limit)s
) page
window w as (order by kind, tenant, id, inserted_at rows between unbounded preceding and unbounded following)
limit 1;

-- name: differences
-- Part of a query: whether a row s of a day and a row c of its copy differ.
case
    when s.location is null then c.location <> 'deleted'
    when c.location is null or c.location = 'deleted' then s.location <> 'deleted'
    when s.location = 'inline' and c.location = 'external' then
        c.checksum is distinct from substring(sha256(convert_to(s.content::text, 'UTF8')) for 16)
    else
        (s.location, s.content::text, s.object_key, s.byte_start, s.byte_length, s.checksum)
        is distinct from (c.location, c.content::text, c.object_key, c.byte_start, c.byte_length, c.checksum)
end

-- name: compare
-- The keys of a range at which a day and its copy differ, up to a limit.
select coalesce(s.tenant, c.tenant), coalesce(s.id, c.id), coalesce(s.inserted_at, c.inserted_at), coalesce(s.kind, c.kind)
from (
    select * from {day}
    where (%(after_kind)s::text is null or (kind, tenant, id, inserted_at)
            > (%(after_kind)s::text, %(after_tenant)s::text, %(after_id)s::text, %(after_at)s::timestamptz))
        and (%(till_kind)s::text is null or (kind, tenant, id, inserted_at)
            <= (%(till_kind)s::text, %(till_tenant)s::text, %(till_id)s::text, %(till_at)s::timestamptz))
) s
full join (
    select * from {copy}
    where (%(after_kind)s::text is null or (kind, tenant, id, inserted_at)
            > (%(after_kind)s::text, %(after_tenant)s::text, %(after_id)s::text, %(after_at)s::timestamptz))
        and (%(till_kind)s::text is null or (kind, tenant, id, inserted_at)
            <= (%(till_kind)s::text, %(till_tenant)s::text, %(till_id)s::text, %(till_at)s::timestamptz))
) c using (kind, tenant, id, inserted_at)
where {differences}
limit %(limit)s;

-- name: compare_written
-- The keys written since a snapshot at which a day and its copy differ, up to a limit.
select w.tenant, w.id, w.inserted_at, w.kind
from (
    select distinct kind, tenant, id, inserted_at
    from {written}
    where xid >= pg_snapshot_xmin(%(since)s::pg_snapshot) and not pg_visible_in_snapshot(xid, %(since)s::pg_snapshot)
) w
left join {day} s on (s.kind, s.tenant, s.id, s.inserted_at) = (w.kind, w.tenant, w.id, w.inserted_at)
left join {copy} c on (c.kind, c.tenant, c.id, c.inserted_at) = (w.kind, w.tenant, w.id, w.inserted_at)
where {differences}
limit %(limit)s;

-- name: transactions
-- The open transactions of clients in this database, except this one: their snapshots may be old. Leaves out transactions
-- that only hold a lock, without a snapshot or an id.
select l.virtualtransaction, l.pid
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'virtualxid' and l.granted and l.pid <> pg_backend_pid()
    and a.datid = (select oid from pg_database where datname = current_database())
    and coalesce(a.backend_type, 'client backend') = 'client backend'
    and coalesce(a.state <> 'idle in transaction' or num_nonnulls(a.backend_xmin, a.backend_xid) > 0, true);

-- name: lock_to_exchange
-- Waits for the readers and writers of a day, and keeps new ones out.
lock table only payload in access exclusive mode;
lock table {day}, {copy} in access exclusive mode;

-- name: exchange
-- Replaces a day by its copy. The copy's check constraint saves PostgreSQL a scan of its rows.
alter table payload detach partition {day};
drop trigger payload_mirror on {day};
drop function {mirror}();
alter table {day} rename to {old};
alter index {day_key} rename to {old_key};
alter table {copy} rename to {day};
alter index {copy_key} rename to {day_key};
alter table payload attach partition {day} for values from ({from_day}) to ({to_day});
alter table {day} drop constraint {bounds};

-- name: note_exchange
-- Records how long readers and writers were kept out.
update payload_day set swap_lock_ms = %(milliseconds)s where day = %(day)s;

-- name: drop_old
-- Drops the old partition of a day.
drop table if exists {old}, {written};

-- name: drop_copy
-- Drops a copy and its trigger.
drop trigger if exists payload_mirror on {day};
drop function if exists {mirror}();
drop table if exists {copy}, {written};
