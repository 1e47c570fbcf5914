-- What came with its file from outside is told from what compactions wrote and splits moved.

-- true where that is not known: of references from before
alter table file_reference add column ingested boolean not null default true;
alter table removed_reference add column ingested boolean not null default true;
