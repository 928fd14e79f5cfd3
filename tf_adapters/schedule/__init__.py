"""Pipeline schedules as data: actions, their order on every rank, and their graph."""
