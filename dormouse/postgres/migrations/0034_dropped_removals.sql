-- What readers of an older snapshot must know of removals that are not in the log any more.

alter table tables
    -- no removal that is not in the log any more is of a later transaction; null: none was dropped
    add column log_dropped_xid xid8,
    -- the last transaction that dropped some
    add column log_dropped_by xid8;
