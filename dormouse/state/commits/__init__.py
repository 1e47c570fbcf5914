"""Commit requests, the queues that they travel through, and the committer that applies them."""
