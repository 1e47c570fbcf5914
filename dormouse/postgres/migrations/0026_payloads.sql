-- Payloads: JSON that is hot for a day and cold after it, a partition a day; and partitions of days, made in one way.

-- Gives a table that is partitioned by time the partition of a day, in UTC; false: it has it. What a default partition
-- has of the day is moved. For roles that own no table, too, so that a missing day keeps nobody from writing.
create function add_day(parent text, day date) returns boolean
language plpgsql security definer set search_path = dormouse set timezone = 'UTC' set datestyle = 'ISO' as $$
declare
    name text := format('%s_%s', parent, to_char(day, 'YYYYMMDD'));
    limits text := format('(%L) to (%L)', day::timestamptz, (day + 1)::timestamptz);
    clock text;
    spare regclass;
    known boolean;
begin
    select a.attname, nullif(t.partdefid, 0)::regclass into strict clock, spare
    from pg_partitioned_table t
    join pg_attribute a on a.attrelid = t.partrelid and a.attnum = t.partattrs[0]
    where t.partrelid = parent::regclass;
    -- others that make days wait; writers do only where their rows may have to be moved
    if spare is null then
        execute format('lock table only %I in share update exclusive mode', parent);
    else
        execute format('lock table only %I, %s in access exclusive mode', parent, spare);
    end if;
    select exists (select from pg_inherits where inhparent = parent::regclass and inhrelid = to_regclass(name)) into known;
    if known then
        return false;
    end if;
    execute format('create table %I (like %I including all)', name, parent);
    if spare is not null then
        execute format(
            'with moved as (delete from %1$s where %2$I >= %3$L and %2$I < %4$L returning *) insert into %5$I select * from moved',
            spare, clock, day::timestamptz, (day + 1)::timestamptz, name
        );
    end if;
    execute format('alter table %I attach partition %I for values from %s', parent, name, limits);
    return true;
end
$$;

create table payload (
    kind text collate "C" not null,
    tenant text collate "C" not null,
    id text collate "C" not null,
    inserted_at timestamptz not null,
    -- inline: here; external: in an object; deleted: in no block either, in a day that has blocks
    location text not null default 'inline',
    content jsonb,
    object_key text collate "C",
    byte_start bigint,
    byte_length integer,
    -- the first 16 bytes of the SHA-256 of the content, as PostgreSQL writes it
    checksum bytea,
    -- the order of objects, and so of blocks
    constraint payload_pkey primary key (kind, tenant, id, inserted_at),
    constraint payload_whole check (
        case location
            when 'inline' then content is not null and num_nonnulls(object_key, byte_start, byte_length, checksum) = 0
            when 'external' then content is null and num_nulls(object_key, byte_start, byte_length, checksum) = 0
            when 'deleted' then num_nonnulls(content, object_key, byte_start, byte_length, checksum) = 0
            else false
        end
    )
) partition by range (inserted_at);

do $$
begin
    alter table payload alter column content set compression lz4;
exception when feature_not_supported then
    null;  -- the server was built without it
end
$$;

-- Days that were cooled down, are being so, or are gone; of others there is no row.
create table payload_day (
    day date constraint payload_day_pkey primary key,
    -- open; offloaded: pointers; folding: pointers and blocks; folded: blocks; expired: dropped
    state text not null default 'open'
        constraint payload_day_state_known check (state in ('open', 'offloaded', 'folding', 'folded', 'expired')),
    -- what is being done with it, and the step that comes next; null: nothing
    work text constraint payload_day_work_known check (work in ('offload', 'fold', 'rehydrate', 'rebuild')),
    phase text constraint payload_day_phase_known check (phase in ('prepare', 'copy', 'verify', 'swap', 'finish')),
    -- who works on it, until when; each that takes it over has a larger token
    token bigint not null default 0,
    worker text,
    leased_until timestamptz,
    -- the last key that the phase is done with; null: none
    after_kind text collate "C",
    after_tenant text collate "C",
    after_id text collate "C",
    after_at timestamptz,
    -- what verification saw when it began
    verified_till pg_snapshot,
    -- of the work in its phases so far, or of the last
    payloads bigint not null default 0,
    bytes_in bigint not null default 0,
    bytes_out bigint not null default 0,
    objects bigint not null default 0,
    seconds float8 not null default 0,
    swap_lock_ms float8,
    -- when it was made hot again; it stays so for a day
    rehydrated_at timestamptz,
    -- why the last try failed, and when
    error text,
    failed_at timestamptz,
    changed_at timestamptz not null default clock_timestamp(),
    constraint payload_day_phase_whole check ((work is null) = (phase is null)),
    constraint payload_day_after_whole check (num_nulls(after_kind, after_tenant, after_id, after_at) in (0, 4))
);

-- Every object of payloads: announced before it is written, and forgotten after it is deleted.
create table payload_object (
    object_key text collate "C" constraint payload_object_pkey primary key,
    day date not null,
    -- pending: no transaction relies on it yet; live: pointers do; staged: a block that is not read yet; block: it stands
    -- for its payloads; dead: to be deleted
    state text not null default 'pending'
        constraint payload_object_state_known check (state in ('pending', 'live', 'staged', 'block', 'dead')),
    -- whose it is while it is pending
    token bigint not null,
    -- whether the fold that is under way goes on with it as a block
    kept boolean not null default false,
    -- whether it was read back since it was written, as it is before anything is given up for it
    verified boolean not null default false,
    changed_at timestamptz not null default clock_timestamp(),
    byte_count bigint,
    -- SHA-256 of all of it
    digest bytea,
    payloads bigint,
    first_kind text collate "C",
    first_tenant text collate "C",
    first_id text collate "C",
    first_at timestamptz,
    last_kind text collate "C",
    last_tenant text collate "C",
    last_id text collate "C",
    last_at timestamptz,
    -- where its index begins, and its dictionaries: {kind: [start, length]}
    index_start bigint,
    dictionaries jsonb,
    constraint payload_object_whole check (
        state in ('pending', 'dead')
        or num_nulls(
            byte_count, digest, payloads, first_kind, first_tenant, first_id, first_at, last_kind, last_tenant, last_id,
            last_at, index_start, dictionaries
        ) = 0
    )
);
-- those of a day
create index payload_object_day on payload_object (day, state);
-- the block that may have a payload
create index payload_object_block on payload_object (day, last_kind, last_tenant, last_id, last_at) where state = 'block';
-- what is to be deleted, or may have to be
create index payload_object_left on payload_object (changed_at) where state in ('pending', 'dead');
