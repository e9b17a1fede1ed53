/* Made by packaging/constants of what the Python program knows: change it there. */
#ifndef FORESTAGE_CONSTANTS_H
#define FORESTAGE_CONSTANTS_H

#define PROTOCOL_GREETING "forestage 4"
#define MAX_LINE_BYTES 16384
#define RESULT_VARIABLE "FORESTAGE_RESULT"
#define IMAGE_PATH_VARIABLE "FORESTAGE_IMAGE_PATH"
#define DATA_RESULT_VARIABLE "FORESTAGE_DATA_RESULT"
#define LOCAL_PATHS_VARIABLE "FORESTAGE_LOCAL"
#define DIRECTORY_VARIABLE "FORESTAGE_DIR"
#define DIRECTORY_RECORD_FORMAT 1
#define STEP_ENVIRONMENT_VARIABLE "FORESTAGE_ENVIRONMENT"
#define STEP_GROUPS_VARIABLE "FORESTAGE_GROUPS"
#define STEP_HOME_VARIABLE "FORESTAGE_HOME"
#define STEP_MANAGER_VARIABLE "FORESTAGE_MANAGER"
#define STEP_PATH_VARIABLE "FORESTAGE_PATH"
#define STEP_TIMEOUT_VARIABLE "FORESTAGE_TIMEOUT"
#define USER_FILE_NAME "events.jsonl"
#define MAX_USER_FILE_BYTES 262144
#define KEPT_USER_FILE_BYTES 131072
#define MAX_HINTED_PATHS 16
#define MAX_OPTION_CHARS 16384
#define REFUSED_EXIT_STATUS 65
#define STAGE_VARIABLE "FORESTAGE_STAGE"
#define MAX_RECORD_BYTES 65536
#define HELPER_PATH "/usr/lib/forestage/bin/forestage"
#define TASK_TURNS 8
#define RUN_DIRECTORY "/run/forestage"
#define LEASE_DIRECTORY RUN_DIRECTORY "/leases"
#define STEP_IMAGE_DIRECTORY RUN_DIRECTORY "/images"
#define MOUNT_LOCK_FILE RUN_DIRECTORY "/mounting"
#define LOADED_MARK RUN_DIRECTORY "/companion"
#define EVENT_LOG "/var/log/forestage/events.jsonl"
#define USER_LOG_DIRECTORY RUN_DIRECTORY "/users"
#define JOB_DIRECTORY "/forestage/job"
#define NO_MOUNT "no-mount"
#define MOUNT_HANGS "mount-hangs"
#define MOUNT_QUEUE "mount-queue"
#define STEP_RECORD_SUFFIX ".shown"
#define HINTS_SUFFIX ".hinted"
#define DIRECTORY_RECORD_SUFFIX ".directory"
#define PROLOG_MARK_SUFFIX ".prolog"
#define ENTRIES_NAME "entries"
#define EVICTED_NAME "evicted"
#define FUSE_TYPE "fuse.forestage"
#define HOLD_CGROUP RUN_DIRECTORY "/hold"
#define SERVE_TIMEOUT_S 13
#define TASK_LOCKS_START 0
#define TASK_LOCKS_WIDTH 536870912LL
#define RUN_DIRECTORY_MODE 0711
#define SLURM_CGROUP_NAMES "slurm*", "*slurmstepd.scope", "job_*"

#endif
