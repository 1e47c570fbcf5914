-- What was refused of a commit that is applied in part is remembered with it.

-- how many requests it has, and of each refused one the number, the error's class, file, partition and job; null: none
alter table applied_commit add column refused jsonb;
