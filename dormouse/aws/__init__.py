"""The commands for a deployed instance (cost, checks, pause, resume, restore, destroy) and its schedules."""
