"""The operations of Dormouse (verbs). Each is described once, for Python, the command line, HTTP and jobs."""
