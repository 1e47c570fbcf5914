-- Cuts that were recorded after the database's clock was set back, so that times can be told by them.

-- what the clock said, where it is not recorded_at, as that of the last cut was later
alter table cut add column clock_at timestamptz;
create index cut_set_back on cut (table_id, cut_id) where clock_at is not null;
