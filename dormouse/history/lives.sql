-- name: lives
-- The lives of the database after its first, the earliest first, and after which transaction each began.
select incarnation_id::text, added_xid::text::bigint from incarnation where reason in ('adoption', 'copy') order by number;
