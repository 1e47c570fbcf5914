"""The stacks of an instance, which connect the constructs of `stacks.constructs` according to the settings.

`stacks.instance.build` makes Dormouse's own app. `Dormouse` is a construct for other apps, which install this
package under the name `dormouse_cdk`. The stacks read neither the CDK's context nor the environment. Of the
package dormouse, they import only the settings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stacks.construct import Dormouse

__all__ = ["Dormouse"]


def __getattr__(name: str) -> object:
    # Imported late: the CDK takes a second to load, and app.py must choose its Node before.
    if name != "Dormouse":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stacks.construct import Dormouse

    return Dormouse
