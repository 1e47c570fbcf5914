-- What only epochs before a truncation had is forgotten, piece by piece.

alter table truncation
    -- partitions that left the tree up to this epoch are forgotten, and epochs before it whose leaves had all ended then
    add column forgotten_epoch bigint not null default 0;
