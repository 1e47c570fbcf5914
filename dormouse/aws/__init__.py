"""A deployed instance: its schedules, its costs, and how it is paused, resumed, examined and destroyed."""
