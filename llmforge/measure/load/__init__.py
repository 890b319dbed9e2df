"""Measures how an artifact serves: loads, latencies, throughput and goodput."""

from llmforge.measure.load.report import BenchReport, table
from llmforge.measure.load.run import Load, LocalEngine, run
from llmforge.measure.load.sweep import Plan
from llmforge.metrics.serving import Objective

__all__ = ["BenchReport", "Load", "LocalEngine", "Objective", "Plan", "run", "table"]
