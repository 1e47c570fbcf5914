"""The stacks of an instance: thin, wiring the constructs of `stacks.constructs` as the settings say.

`stacks.instance.build` makes our app; `Dormouse` is for those of others, where this package is installed as
`dormouse_cdk`. Here nothing reads context or environment, and of the package dormouse only its settings are
known.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stacks.construct import Dormouse

__all__ = ["Dormouse"]


def __getattr__(name: str) -> object:
    # The CDK takes a second to load, and app.py says before on which Node.
    if name != "Dormouse":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stacks.construct import Dormouse

    return Dormouse
