-- Compaction jobs know the run of Spark that they were handed to.

-- Without a default that is computed, both columns cost no rewrite; jobs that were there belong to no run.
alter table compaction_job
    -- null: handed to none, or released by it
    add column run_id uuid,
    -- the run that it was handed to is taken for dead after this
    add column run_until timestamptz not null default '-infinity',
    add constraint compaction_job_run_ends check (run_id is not null or run_until = '-infinity');
-- the jobs of a run
create index compaction_job_run on compaction_job (run_id, table_id) where run_id is not null;
