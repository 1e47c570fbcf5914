-- Digests of what was asked under an id that its sender chose: the same id with another request is refused.

-- of the source of an ingest; null: not known, or recorded by an older Dormouse
alter table applied_commit add column source uuid;
-- of the changes; null: not known, or recorded by an older Dormouse
alter table row_change_id add column digest uuid;
