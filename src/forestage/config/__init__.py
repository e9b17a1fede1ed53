"""The configuration: what the admin decided, where each value comes from, and the off switch.

`keys` describes every key, `values` how values are written, `load` reads the files, `switch` the
file that turns staging off at once. Other folders import from here.
"""

from forestage.config.keys import ANYWHERE as ANYWHERE
from forestage.config.keys import KEYS as KEYS
from forestage.config.keys import CompanionPresence as CompanionPresence
from forestage.config.keys import Config as Config
from forestage.config.keys import EngineName as EngineName
from forestage.config.keys import UserMessages as UserMessages
from forestage.config.keys import get_key_value as get_key_value
from forestage.config.keys import resolve_auto_redirect as resolve_auto_redirect
from forestage.config.load import DEFAULT as DEFAULT
from forestage.config.load import REMOVED_KEYS as REMOVED_KEYS
from forestage.config.load import ConfigRow as ConfigRow
from forestage.config.load import LoadedConfig as LoadedConfig
from forestage.config.load import format_key_name as format_key_name
from forestage.config.load import load_config as load_config
from forestage.config.values import ServiceAddress as ServiceAddress
from forestage.config.values import parse_address as parse_address
