/* Made by packaging/constants of what the Python program knows: change it there. */
#ifndef FORESTAGE_CONSTANTS_H
#define FORESTAGE_CONSTANTS_H

#define LANGUAGE "forestage 4"
#define MAX_LINE 16384
#define RESULT "FORESTAGE_RESULT"
#define IMAGE_PATH "FORESTAGE_IMAGE_PATH"
#define DATA_RESULT "FORESTAGE_DATA_RESULT"
#define LOCAL "FORESTAGE_LOCAL"
#define DIRECTORY "FORESTAGE_DIR"
#define DIRECTORY_FORMAT 1
#define STEP_ENVIRONMENT "FORESTAGE_ENVIRONMENT"
#define STEP_GROUPS "FORESTAGE_GROUPS"
#define STEP_HOME "FORESTAGE_HOME"
#define STEP_MANAGER "FORESTAGE_MANAGER"
#define STEP_PATH "FORESTAGE_PATH"
#define STEP_TIMEOUT "FORESTAGE_TIMEOUT"
#define USER_FILE_NAME "events.jsonl"
#define USER_FILE_BYTES 262144
#define USER_KEPT_BYTES 131072
#define MAX_HINTED 16
#define MAX_OPTION 16384
#define REFUSED 65
#define HANDED_OVER "FORESTAGE_STAGE"
#define RECORD_BYTES 65536
#define HELPER "/usr/lib/forestage/bin/forestage"
#define TASK_TURNS 8
#define RUN "/run/forestage"
#define LEASES RUN "/leases"
#define IMAGES RUN "/images"
#define MOUNTING RUN "/mounting"
#define LOADED RUN "/companion"
#define EVENTS "/var/log/forestage/events.jsonl"
#define USERS RUN "/users"
#define JOB_DIR "/forestage/job"
#define NO_MOUNT "no-mount"
#define MOUNT_HANGS "mount-hangs"
#define MOUNT_QUEUE "mount-queue"
#define SHOWN_SUFFIX ".shown"
#define HINTED_SUFFIX ".hinted"
#define DIRECTORY_SUFFIX ".directory"
#define PROLOG_SUFFIX ".prolog"
#define ENTRIES "entries"
#define EVICTED "evicted"
#define FUSE_TYPE "fuse.forestage"
#define HOLD RUN "/hold"
#define SERVED_SECONDS 13
#define TASK_MOUNTS_START 0
#define TASK_MOUNTS_WIDTH 536870912LL
#define RUN_MODE 0711
#define SLURMS "slurm*", "*slurmstepd.scope", "job_*"

#endif
