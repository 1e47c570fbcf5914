-- Small ingests into new tables are inlined by default. Tables from before keep writing objects.

update tables set properties = properties || '{"inline_bytes_max": 0}' where not properties ? 'inline_bytes_max';
