-- name: rename_references
-- Gives the references the name that the other layout looks for; this costs nothing, however many there are.
alter table {old_reference} rename to {file_reference};

-- name: adopt_files
-- Tracks the files as the other layout does.
with fact as materialized (
    {file_facts}
)
{adopt};
