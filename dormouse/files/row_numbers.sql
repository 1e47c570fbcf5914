-- name: number_alone
-- Whether no other numbers rows of the table; the lock ends with the transaction, which is idle for all of the load.
select
    pg_try_advisory_xact_lock(hashtextextended('row numbers', %(table_id)s)),
    set_config('idle_in_transaction_session_timeout', '0', true);
