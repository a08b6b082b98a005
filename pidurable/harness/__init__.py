"""The facade that a host opens: conversations, submissions, waits, events."""
