"""Builds over many hosts, on Ray: a matrix of models, targets and variants, and a search for options.

`matrix` reads which builds there are, `placing` says what of a cluster each asks for, `cluster` opens Ray and hands
builds to it, `worker` is what runs on a node, and `running` follows a matrix to its end. `searching` drives Optuna over
the same workers, in a space that `space` reads off a recipe. `pareto`, `page` and `tuned` show what came out.

Ray schedules: nothing here chooses a node. Paths, digests and figures travel, tensors do not. What a build has computed
lies in the cache of builds, so that a build that is run again takes it from there.
"""
