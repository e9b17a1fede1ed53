"""The step protocol: lines of fields between tabs, which `src/spank/step_protocol.c` parses.

A step's helper answers by them, who imports an image sends them to the tasks that wait, a packet
each (features/registry/waiting_tasks.py), and a record keeps them for further steps
(cache/step_record.py). PROTOCOL_GREETING is the first. A companion that knows another one leaves
the step as it is. What else it does not understand it leaves out.

    say     TEXT                            for the user, who sits at the terminal and waits
    env     NAME [VALUE]                    a variable of the step; without a value it has none of
                                            ours, but what the user has set
    use     ENTRY PATH FACTS TELL           the step's image, at PATH: this entry shows there
    through SOCKET PATH FACTS TELL          … the file that a keeper serves
    also    use|through …                   one more image
    device  DEVICE FILE KIND ro|rw TARGET INODE|root
                                            a loop device's file system of KIND, at TARGET
    served  SOCKET TARGET INODE|root        a clone of the mount that a keeper holds, at TARGET
    folder  PATH TARGET root                PATH made in a tmpfs over TARGET, which it hides
    later   SOCKET                          who knows more listens there: the tasks wait
    leave   REASON                          the image's path stays as it is

`use`, `through`, `later` and `leave` end an answer. A line has all that a task looks at before it
mounts. FACTS are inode, size, mtime and ctime (ns) of the file at PATH, which is resolved; with
TELL, 0 or 1, the user hears where it is another one. FILE is what the device has to show
(system/loop.format_file_id). TARGET is a directory without links on its way. INODE is its number as
the user sees it: the task opens it as the user. `root`: it is root's own, and is opened as root.

This imports nothing: a helper writes its first line before it knows that there is work.
"""

PROTOCOL_GREETING = "forestage 4"
MAX_LINE_BYTES = 16384  # bytes; the companion reads no longer one

# What the companion puts into a step's environment, of its image, its data and its own directory.
RESULT_VARIABLE, IMAGE_PATH_VARIABLE = "FORESTAGE_RESULT", "FORESTAGE_IMAGE_PATH"
DATA_RESULT_VARIABLE, LOCAL_PATHS_VARIABLE = "FORESTAGE_DATA_RESULT", "FORESTAGE_LOCAL"
DIRECTORY_VARIABLE = "FORESTAGE_DIR"

# Of the record by which the companion shows a job's own directory without a helper.
DIRECTORY_RECORD_FORMAT = 1
SERVE_TIMEOUT = (
    10.0  # seconds until a program that serves a file has it read: a task waits for them
)

# … and into a helper's, beside variables that a Prolog has as well.
# The descriptor from which the step's environment can be read.
STEP_ENVIRONMENT_VARIABLE = "FORESTAGE_ENVIRONMENT"
STEP_GROUPS_VARIABLE, STEP_HOME_VARIABLE = "FORESTAGE_GROUPS", "FORESTAGE_HOME"
STEP_MANAGER_VARIABLE, STEP_PATH_VARIABLE = "FORESTAGE_MANAGER", "FORESTAGE_PATH"
STEP_TIMEOUT_VARIABLE = "FORESTAGE_TIMEOUT"  # seconds until the helper is killed

LineFields = tuple[str, ...]


def encode_line(*fields: str) -> bytes:
    """Pure: a line, without its end."""
    return "\t".join(fields).encode(errors="backslashreplace")


def has_control_characters(text: str) -> bool:
    """Pure: whether a text holds what ends a line or a field, or moves a terminal's cursor."""
    return any(ord(char) < 32 or ord(char) == 127 for char in text)
