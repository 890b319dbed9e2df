"""Fleet size: how many devices meet an objective at a rate of requests, by serving in simulation."""

from llmforge.planning.fleet.answer import FleetPlan, FleetRequest, of_artifact, of_plans
from llmforge.planning.fleet.load import parse_rate
from llmforge.planning.fleet.render import data, table

__all__ = ["FleetPlan", "FleetRequest", "data", "of_artifact", "of_plans", "parse_rate", "table"]
