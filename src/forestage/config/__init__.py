"""The configuration: what the admin decided, where each value comes from, and the off switch.

`keys` describes every key, `values` how values are written, `load` reads the files, `switch` the
file that turns staging off at once. Other folders import from here.
"""

from forestage.config.keys import (
    KEYS,
    Config,
    Engine,
    Metering,
    Peering,
    UserMessages,
    decided,
    value_of,
)
from forestage.config.load import DEFAULT, Overrides, Row, Settings, dotted, load_settings
from forestage.config.values import Address, parse_address

__all__ = [
    "DEFAULT",
    "KEYS",
    "Address",
    "Config",
    "Engine",
    "Metering",
    "Overrides",
    "Peering",
    "Row",
    "Settings",
    "UserMessages",
    "decided",
    "dotted",
    "load_settings",
    "parse_address",
    "value_of",
]
