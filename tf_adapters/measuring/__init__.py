"""How long actions, transfers and steps take, and how much of it freezing saves."""
