-- How far the database has come under an incarnation, as the object store has it, too: one that is behind was put back.

alter table incarnation
    add column milestone bigint not null default 0 constraint incarnation_milestone_counts check (milestone >= 0),
    -- the last milestone's; of two copies that pass the same one, the store has that of one
    add column milestone_id uuid,
    add column passed_at timestamptz,
    -- what had been committed by then; null: not known
    add column passed_in pg_snapshot;
