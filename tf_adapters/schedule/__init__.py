"""Pipeline schedules as data: actions, their order on every rank, and the graph that they make."""
