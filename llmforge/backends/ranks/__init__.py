"""Engines that compute one model together, a process each."""
