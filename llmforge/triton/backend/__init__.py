"""The model that runs in the process of Triton's python backend; a copy of it ships in every model repository.

It imports the runtime, numpy and the standard library alone: a serving environment has no build tools.
"""
