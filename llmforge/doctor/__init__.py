"""The doctor: what this machine is, what can be built and run on it, and how fast it is.

`environment` looks at packages and devices, `ceilings` measures a CPU, `gpus` finds and measures NVIDIA GPUs, `machine`
makes a target file of what was measured, `render` shows it.
"""
