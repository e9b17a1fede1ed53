#!/bin/sh
# pyxis without an importer=, for bench/registry: imports on each node and in each step, and removes
# the file behind the step. enroot's options are its own defaults.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
image=$PYXIS_RUNTIME_PATH/$(id -u)/$SLURM_JOB_ID.$SLURM_STEP_ID.squashfs
case $1 in
    get)
        ENROOT_SQUASH_OPTIONS="-comp lzo -noD" ENROOT_MAX_PROCESSORS=$(nproc) \
            enroot import --output "$image" -- "$2" >"$image.said" 2>&1 || { cat "$image.said" >&2; exit 1; }
        echo "$image"
        ;;
    release) rm -f "$image" "$image.said" ;;
esac
