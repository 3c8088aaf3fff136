"""Routed experts: where a record lies and who executes it."""
