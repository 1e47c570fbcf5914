-- name: pass
-- Passes the milestone after this one, unless another process was faster.
update incarnation
set milestone = milestone + 1, milestone_id = gen_random_uuid(),
    passed_at = clock_timestamp(), passed_in = pg_current_snapshot()
where number = %(number)s and milestone = %(milestone)s
    and confirmed and number = (select max(number) from incarnation)
returning replace(milestone_id::text, '-', '');
