"""The operations that doors share: long work, work on row tables and requests about tables."""
