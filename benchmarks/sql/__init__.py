"""How fast is SQL, beside DuckDB on files of the same rows?"""
