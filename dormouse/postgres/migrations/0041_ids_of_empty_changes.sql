-- Ids of row changes that changed nothing: they have no version of their own, and no row of row_change.

-- how many rows were found to be as they were wanted, of a change that changed nothing; null: the change is in row_change
alter table row_change_id add column unchanged bigint;
