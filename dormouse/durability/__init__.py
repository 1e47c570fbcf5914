"""The safety of database and objects together: ownership, checks, backups, erasures and maintenance."""
