"""Recipes that ship with llmforge."""
