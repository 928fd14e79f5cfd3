"""The report of a run. Nothing here imports matplotlib or rich until a picture or a table is asked for."""

from tf_adapters.report.schema import BackwardSample, Host, Measured, PeakMemory, Phases, Report

__all__ = ["BackwardSample", "Host", "Measured", "PeakMemory", "Phases", "Report"]
