"""Measures how an artifact serves: loads, latencies, throughput and goodput."""

from llmforge.bench.report import BenchReport, table
from llmforge.bench.run import Load, LocalEngine, run
from llmforge.bench.sweep import Plan
from llmforge.metrics.serving import Objective

__all__ = ["BenchReport", "Load", "LocalEngine", "Objective", "Plan", "run", "table"]
