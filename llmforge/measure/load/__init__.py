"""Measures how an artifact serves: loads, latencies, throughput and goodput."""

from llmforge.measure.load.report import BenchReport, LoadPoint
from llmforge.measure.load.run import LoadSpec, LocalEngine, run
from llmforge.measure.load.sweep import SweepPlan
from llmforge.metrics.serving import Objective

__all__ = ["BenchReport", "LoadPoint", "LoadSpec", "LocalEngine", "Objective", "SweepPlan", "run"]
