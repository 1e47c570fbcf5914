-- Keyed tables: each load has its place among the loads, and among the deletions, from when it announces itself.

create sequence load_sequence as bigint;

-- of a load of a keyed table: larger than those of all loads that had announced themselves before; 0: it is about to take
-- it, and no earlier one can be told; null: of what loads no rows, or of a table that keeps every row
alter table write_attempt add column sequence bigint;
-- of a load of a keyed table: the number of the last deletion that came before it
alter table write_attempt add column deletions_till bigint;
