-- name: number_alone
-- Takes the right to number rows of the table, unless another load has it; the lock ends with the transaction.
select pg_try_advisory_xact_lock(hashtextextended('row numbers', %(table_id)s));
