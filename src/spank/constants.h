/* Made by packaging/constants of what the Python program knows: change it there. */
#ifndef FORESTAGE_CONSTANTS_H
#define FORESTAGE_CONSTANTS_H

#define MOST_HINTED 16 /* MAX_HINTED in slurm/hints.py */
#define TASK_MOUNTS_START 0LL /* TASK_MOUNTS in system/lock_ranges.py */
#define TASK_MOUNTS_WIDTH 536870912LL /* TASK_MOUNTS in system/lock_ranges.py */

#endif
