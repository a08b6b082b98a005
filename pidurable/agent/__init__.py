"""The agent: models, and the built-in tasks that make a loop of them."""
