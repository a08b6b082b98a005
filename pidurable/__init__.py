"""pidurable: durable, structured agent work on trio and SQLite."""
