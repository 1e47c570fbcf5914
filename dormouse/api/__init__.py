"""The classes that users work with: instances, tables and row tables, one class a file."""
