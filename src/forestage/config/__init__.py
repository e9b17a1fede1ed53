"""The configuration: what the admin decided, where each value comes from, and the off switch.

`keys` describes every key, `values` how values are written, `load` reads the files, `switch` the
file that turns staging off at once. Other folders import from here.
"""

from forestage.config.keys import ANYWHERE as ANYWHERE
from forestage.config.keys import KEYS as KEYS
from forestage.config.keys import Companion as Companion
from forestage.config.keys import Config as Config
from forestage.config.keys import Engine as Engine
from forestage.config.keys import UserMessages as UserMessages
from forestage.config.keys import decided as decided
from forestage.config.keys import value_of as value_of
from forestage.config.load import DEFAULT as DEFAULT
from forestage.config.load import REMOVED as REMOVED
from forestage.config.load import ConfigRow as ConfigRow
from forestage.config.load import LoadedConfig as LoadedConfig
from forestage.config.load import dotted as dotted
from forestage.config.load import load_settings as load_settings
from forestage.config.values import ServiceAddress as ServiceAddress
from forestage.config.values import parse_address as parse_address
