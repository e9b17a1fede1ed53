"""Why an image of a registry is not staged; events/reasons.py has what these are."""

FAILURES: frozenset[str] = frozenset()

REASONS = {
    "bad-reference": "This is no reference to an image of a registry.",
    "registry-denied": "The registry refuses this user; `enroot import` would be refused as well.",
    "registry-missing": "The registry has no such image, or hides it from this user.",
    "registry-busy": "The registry gets too many requests from here (429).",
    "registry-silent": "The registry could not be reached, or failed.",
    "registry-odd": "The registry's answer was invalid.",
    "environment": "The job's environment is too large to be read.",
    "enroot": "enroot, or its configuration, could not be used as the job's user.",
    "registry-moved": "The tag was pushed again during the import, by an enroot that"
    " does not support digests.",
    "container": "The step's container is there already; its image is not looked at.",
    "import-failed": "`enroot import` ended with an error; the detail has its last words.",
    "store-full": "The store had no space for the image, or the user's quota was exhausted.",
    "enroot-full": "The disk for enroot's temporary files (ENROOT_TEMP_PATH) or for its layers"
    " (ENROOT_CACHE_PATH) was full, or the user's quota there was exhausted.",
    "store-gone": "The store of images could not be reached, or be written to.",
    "store-local": "The store of images lies on the disk of the node's cache, which users could"
    " fill.",
    "store-foreign": "The user's directory in the store is not theirs alone.",
}
