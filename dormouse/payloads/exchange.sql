-- name: make_copy
-- Makes an empty copy of a day, with a check that says what its partition has, and a list of what is written meanwhile.
drop table if exists {copy}, {written};
create table {copy} (like {day} including all);
alter table {copy} add constraint {bounds} check (inserted_at >= {from_day}::timestamptz and inserted_at < {to_day}::timestamptz);
create table {written} (
    kind text collate "C" not null, tenant text collate "C" not null, id text collate "C" not null,
    inserted_at timestamptz not null, xid xid8 not null default pg_current_xact_id()
);
create index on {written} (xid);

-- name: likeness
-- Statements that give a copy what `like` leaves out: options, also of its TOAST table, its owner and grants.
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
-- Has every write to a day written to its copy, too, in the same transaction. A row that was deleted stays in the copy as
-- such, so that a copier of earlier rows meets it. The function runs as its owner, as writers have no right to the copy:
-- no other role can use it for a trigger, and it serves tables of this schema alone, in which only the owner makes tables.
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
-- What is committed by now.
select pg_current_snapshot()::text;

-- name: note_seen
-- What was committed before a snapshot, or before this, is compared; what comes later when the day is exchanged.
update payload_day set verified_till = coalesce(%(till)s::pg_snapshot, pg_current_snapshot()) where day = %(day)s;

-- name: count_written
-- How many writes of since a snapshot there are; at most some.
select count(*)
from (
    select
    from {written}
    where xid >= pg_snapshot_xmin(%(since)s::pg_snapshot) and not pg_visible_in_snapshot(xid, %(since)s::pg_snapshot)
    limit %(limit)s
) w;

-- name: forget_deleted
-- After all is copied: rows of a copy that were only there so that who copied met them; those written since a snapshot.
delete from {copy} c
using {written} w
where (c.kind, c.tenant, c.id, c.inserted_at) = (w.kind, w.tenant, w.id, w.inserted_at) and c.location = 'deleted'
    and w.xid >= pg_snapshot_xmin(%(since)s::pg_snapshot) and not pg_visible_in_snapshot(w.xid, %(since)s::pg_snapshot);

-- name: last_of_page
-- The last key of a page of a day, and how many it has.
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
-- Part of a query: of rows s of a day and c of its copy, those that do not say the same.
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
-- The keys of a range at which a day and its copy differ; at most some.
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
-- The keys that were written since a snapshot at which a day and its copy differ; at most some.
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
-- The transactions of clients in this database that are under way, but for this one: they may see what was before. Not
-- those that keep a lock for as long as other work takes, and see and write nothing meanwhile.
select l.virtualtransaction, l.pid
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'virtualxid' and l.granted and l.pid <> pg_backend_pid()
    and a.datid = (select oid from pg_database where datname = current_database())
    and coalesce(a.backend_type, 'client backend') = 'client backend'
    and coalesce(a.state <> 'idle in transaction' or num_nonnulls(a.backend_xmin, a.backend_xid) > 0, true);

-- name: lock_to_exchange
-- Waits for the readers and writers of a day, and keeps others out.
lock table only payload in access exclusive mode;
lock table {day}, {copy} in access exclusive mode;

-- name: exchange
-- Puts a copy into the place of its day. Its check says that no row must be looked at.
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
-- How long readers and writers were kept out.
update payload_day set swap_lock_ms = %(milliseconds)s where day = %(day)s;

-- name: drop_old
-- Drops what a day was before.
drop table if exists {old}, {written};

-- name: drop_copy
-- Gives a copy up.
drop trigger if exists payload_mirror on {day};
drop function if exists {mirror}();
drop table if exists {copy}, {written};
