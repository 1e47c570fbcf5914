-- Commits are found by their id first, whichever table they are of: to ask for one costs the same beside any number of tables.

alter table applied_commit
    drop constraint applied_commit_pkey,
    add constraint applied_commit_pkey primary key (commit_key, table_id);
-- what goes with a table, beside what expires; no look-up by id can be planned through it
create index applied_commit_kept on applied_commit (table_id) where expires_at is null;
