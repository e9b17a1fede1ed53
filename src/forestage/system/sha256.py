"""SHA-256 without hashlib, which loads OpenSSL: a twentieth of a hook's time.

The standard library does the same where it needs no more (random, with SHA-512).
"""

import importlib
import sys

try:
    _module = importlib.import_module("_sha2" if sys.version_info >= (3, 12) else "_sha256")
except ImportError:  # a Python built without it
    _module = importlib.import_module("hashlib")


def sha256(data: bytes) -> str:
    """Pure: the SHA-256 of these bytes, in hexadecimal digits."""
    digits: str = _module.sha256(data).hexdigest()
    return digits
