-- The files that were put for cells, so that it is known which objects must be there. Those of before have no row.

create table cell_file (
    table_id integer not null references row_table on delete cascade,
    file_id uuid not null,
    byte_count bigint not null,
    sha256 bytea not null,
    constraint cell_file_pkey primary key (table_id, file_id)
);
