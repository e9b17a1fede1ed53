"""Images of registries: resolved once, imported once, then a path like any other.

    worker            root's side: starts the worker as the user, and reads what it says
    worker_messages   what the two say to each other
    parent_pipe       the worker's side of that
    worker_main       the worker: all that touches a registry, credentials, enroot or the store
    reference         what a user's text names
    environment       the user's settings, as enroot would read them
    resolve           what a tag means now, with `registry_replies` and `credentials`
    image_import      the way to an image: found, or imported by one worker for all
    store             the user's directory of imported images, which all nodes share
    import_lease      who imports, so that a dead importer loses it
    enroot_import     enroot, with bounds
    store_collection  what goes of the store
    user_notes        that the store had no room, that a registry refused a step's image
    step_files        what this node has of steps: the files that copies are bound over, imports

Root never parses what a registry or a user wrote: the worker has all three ids of the user.
"""
