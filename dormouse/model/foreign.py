"""Values of NumPy, pandas, Polars and Arrow as Python's, without importing any of them."""

from __future__ import annotations

from typing import Any

_PACKAGES = {"numpy", "pandas", "polars", "pyarrow"}
_OF_MANY = ("to_pylist", "to_list", "tolist")
_OF_ONE = ("as_py", "to_pydatetime", "item")


def plain(value: Any) -> Any:
    """The value as Python has it, a list for arrays and series; what is Python's already, as it is.

    Instants are taken in microseconds, and left alone if that would lose anything.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _PACKAGES:
        return value
    if kind.__name__ == "datetime64":
        exact = value.astype("datetime64[us]")
        return exact.item() if exact == value and value.dtype.str[-2:] != "D]" else value.item()
    methods = _OF_ONE if getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__") else _OF_MANY
    convert = next((getattr(value, name) for name in methods if hasattr(value, name)), None)
    if convert is None or bool(getattr(value, "nanosecond", 0)):
        return value
    found = convert()
    # of Arrow's nanoseconds pandas makes its own
    return value if getattr(found, "nanosecond", 0) else found
