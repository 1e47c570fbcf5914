-- Jobs are found by their id first: whatever statistics say, no other index serves a look-up of many.

alter table compaction_job
    drop constraint compaction_job_pkey,
    add constraint compaction_job_pkey primary key (job_id, table_id, partition_id);
