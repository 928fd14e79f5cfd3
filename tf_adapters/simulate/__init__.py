"""A pipeline that nobody has to run: what freezing would bring to a schedule, from measured or assumed times.

In Python: ``simulation.simulate(Pipeline(...))``, with ``Pipeline`` of ``simulated_pipeline``. Nothing is imported
here: the command line must start quickly.
"""
