"""A pipeline that nobody has to run: what freezing would bring to a schedule, from measured or assumed times.

In Python: ``tf_adapters.simulate.simulation.simulate(Pipeline(...))`` with ``tf_adapters.simulate.pipeline.Pipeline``.
Nothing is imported here: the command line must start quickly.
"""
