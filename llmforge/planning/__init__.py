"""What a checkpoint would do on a device, from its configuration and the device's facts alone: no weight is read.

`config` reads a shape from config.json (`families`, or the frontend for architectures that those do not know),
`scheme` says in which dtypes it is stored and computed, `roofline` gives bytes and times, `deployment` puts a plan
together with what a build costs (`building`) and which passes pay (`advice`); `render` and `plot` show it.
docs/planning.md has the formulas.
"""
