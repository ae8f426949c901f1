"""The house's one-line refusal: `<name> must be <rule>, got <value>; <what to do>`.

Deliberately absent: exception classes of our own; what a user can mend is a ValueError.
"""

from __future__ import annotations


def require(holds: bool, key: str, rule: str, value: object, remedy: str = "") -> None:
    """Raise the house's one-line ValueError unless the rule holds."""
    if not holds:
        shown = repr(value) if len(repr(value)) <= 200 else repr(value)[:197] + "..."
        raise ValueError(f"{key} must be {rule}, got {shown}" + (f"; {remedy}" if remedy else ""))
