-- How the last round of maintenance of each kind ended, of each table, and which compaction jobs were given up.

create table last_round (
    table_id integer not null references tables on delete cascade,
    -- compaction: jobs made and run; split: full leaves and references above leaves; collection: garbage
    kind text collate "C" not null
        constraint last_round_kind_known check (kind in ('compaction', 'split', 'collection')),
    -- null: none has ended yet
    began_at timestamptz,
    ended_at timestamptz,
    -- why the last one failed, or a job was given up since; null: it went well
    error text,
    -- how many failed one after the other
    failures integer not null default 0,
    -- when the first of these ended, or gave a job up; null: none
    failing_since timestamptz,
    -- compaction jobs that were given up, in all; the reason of the last one, and when
    given_up bigint not null default 0,
    given_up_reason text,
    given_up_at timestamptz,
    constraint last_round_pkey primary key (table_id, kind),
    constraint last_round_fails_since check ((error is null) = (failing_since is null))
);
-- the same rows are written again and again
alter table last_round set (fillfactor = 50);
