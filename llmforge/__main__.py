"""`python -m llmforge` is the command `llmforge`."""

from llmforge.cli import main

main()
