-- name: number_alone
-- Whether no other numbers rows of the table; the lock ends with the transaction.
select pg_try_advisory_xact_lock(hashtextextended('row numbers', %(table_id)s));
