"""The stacks of an instance: thin, wiring the constructs of `stacks.constructs` as the settings say.

`stacks.instance.build` makes the app. Here nothing reads context or environment, and of the package
dormouse only its settings are known.
"""
