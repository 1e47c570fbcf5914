-- The index of the times of epochs tells the epoch of a time by itself.

create unique index epoch_by_time on epoch (table_id, created_at) include (epoch);
drop index epoch_created_at;
