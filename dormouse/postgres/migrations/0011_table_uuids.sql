-- A table is known by a UUID beyond this database: a database that is restored gives its numbers again.

alter table tables
    add column table_uuid uuid,
    -- it may have objects in data/t<number>/, where tables had them before
    add column numbered boolean not null default true;
-- the same in each copy of a database that is migrated after it was copied
update tables t
set table_uuid = md5(concat_ws(' ', i.instance_id, t.table_id, extract(epoch from t.created_at)))::uuid
from instance i;
alter table tables
    alter column numbered set default false,
    alter column table_uuid set not null,
    alter column table_uuid set default gen_random_uuid(),
    add constraint tables_uuid_unique unique (table_uuid);
