"""The graph: its dialect, its operators, and what is done to any graph.

`operators` is the one table of operators; `dialect` checks a graph against it; `interface` names inputs and outputs.
`graph` edits; `derived` has tensors that are computed when they are read, which `scratch` keeps in a file; `expansion`
writes operators as standard ONNX (`moe`, `recurrence`, `masked_step` and `builder` serve it); `diff` and `summary` say
what a graph holds; `routing` finds experts and their routers.
"""
