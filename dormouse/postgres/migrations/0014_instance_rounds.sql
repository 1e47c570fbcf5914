-- How the last round of maintenance of each kind ended that is of the instance, and not of one table.

create table instance_round (
    kind text collate "C" constraint instance_round_pkey primary key,
    began_at timestamptz not null,
    ended_at timestamptz not null,
    -- why it failed; null: it went well
    error text,
    -- when one went well last
    well_at timestamptz
);
