"""Plans of pipelines that nobody has to run: the gain of freezing in a schedule with measured or assumed times.

In Python: ``simulation.simulate(Pipeline(...))``, with ``Pipeline`` of ``simulated_pipeline``. Nothing is imported
here: the command line must start quickly.
"""
