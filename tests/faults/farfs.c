/* A shared file system for tests: shows a folder, as slowly and as oddly as it is told.
 *
 *     farfs FOLDER CONTROL MOUNTPOINT OPTIONS
 *
 * CONTROL is a file with words and numbers, read anew at each call; `read_control` has the words.
 * CONTROL.calls gets the name of each call. OPTIONS are those of mount(8).
 * To stop answering at all, stop the process. To be gone, kill it. */

#define _GNU_SOURCE /* O_PATH, renameat2 */
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int source_fd; /* all paths are relative to it */
static int calls_fd;  /* the file of names */
static const char *control_path;

/* What CONTROL says of a word; 0 where it says nothing.
 *     reads N    each read waits N ms; -1 waits until it says otherwise
 *     hold N     reads behind the first N MiB, but for the last 4, wait until it says otherwise
 *     delay N    each call waits N ms
 *     stalls N   the first of each 8 reads waits N ms
 *     short N    a read gives N bytes at most
 *     eintr N    of N reads, one says that it was interrupted
 *     seconds 1  times have no fractions
 *     ago N      all was changed N seconds earlier than it was
 *     ahead N    this mount's clock is N seconds ahead: it sets the times of what it makes or touches
 *     inodes 1   each look finds another inode number
 *     alike 1    all files have one inode number, one time and, they say, two names
 *     longer N   each file says that it is N bytes longer than it is
 *     blockless 1  each file says that it has no blocks
 *     unlinked 1 each file says that no name leads to it
 *     nodata 1   SEEK_DATA finds no data up to the end
 *     later N    … finds them N KiB behind where they begin, and SEEK_HOLE no hole
 *     same 1     both find what they look for where they begin to look
 *     forges 1   behind their first 4 KiB, files have other bytes than they have
 *     squash 1   to open and to look, root is nobody: what others may not, root may not
 *     squash 2   and root reads nothing, from open files neither
 *     quota N    of N MiB and more in one file nothing is written: EDQUOT
 *     links 1    there are no hard links
 *     links 2    nor a rename that replaces nothing */
static int read_control(const char *word)
{
    char found_word[32];
    int number, value = 0;
    FILE *file = fopen(control_path, "r");
    while (file && !value && fscanf(file, "%31s %d", found_word, &number) == 2)
        if (!strcmp(found_word, word))
            value = number;
    if (file)
        fclose(file);
    return value;
}

static const char *relative_path(const char *path)
{
    return path[1] ? path + 1 : ".";
}

static void log_call(const char *name)
{
    dprintf(calls_fd, "%s\n", name);
    usleep(read_control("delay") * 1000);
}

/* Whether root, being nobody, gets through the folders above and has these rights itself. */
static int check_squashed_access(const char *path, mode_t rights)
{
    struct stat status;
    char parent[4096];
    if (fuse_get_context()->uid != 0 || !read_control("squash"))
        return 0;
    for (const char *slash = path; (slash = strchr(slash + 1, '/'));) {
        snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
        if (fstatat(source_fd, relative_path(parent), &status, 0) || !(status.st_mode & 1))
            return -EACCES;
    }
    if (rights &&
        (fstatat(source_fd, relative_path(path), &status, 0) || !(status.st_mode & rights)))
        return -EACCES;
    return 0;
}

/* Where nodes and no server set the times: what happened to a file now happened by our clock. */
static void set_file_times(int fd, const char *path)
{
    int ahead_s = read_control("ahead");
    struct timespec times[2];
    if (!ahead_s)
        return;
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec += ahead_s;
    times[1] = times[0];
    if (fd >= 0)
        futimens(fd, times);
    else
        utimensat(source_fd, relative_path(path), times, AT_SYMLINK_NOFOLLOW);
}

static void *far_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    (void)conn;
    config->use_ino = 1;
    /* Nothing is kept by the kernel: each look comes here. */
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
    return NULL;
}

static int far_getattr(const char *path, struct stat *status, struct fuse_file_info *info)
{
    static atomic_int getattr_count;
    log_call("getattr");
    /* Of a file that somebody has opened, as over NFS: no folder is in the way. */
    int error = info && read_control("squash") == 1 ? 0 : check_squashed_access(path, 0);
    if (error)
        return error;
    if (info ? fstat(info->fh, status)
             : fstatat(source_fd, relative_path(path), status, AT_SYMLINK_NOFOLLOW))
        return -errno;
    if (read_control("seconds"))
        status->st_mtim.tv_nsec = status->st_ctim.tv_nsec = 0;
    status->st_mtim.tv_sec -= read_control("ago");
    status->st_ctim.tv_sec -= read_control("ago");
    if (read_control("inodes"))
        status->st_ino += 1000 * ++getattr_count;
    if (read_control("alike") && S_ISREG(status->st_mode)) {
        status->st_ino = 77;
        status->st_nlink = 2;
        status->st_mtim = status->st_ctim = (struct timespec){1000000000, 0};
    }
    if (S_ISREG(status->st_mode))
        status->st_size += read_control("longer");
    if (S_ISREG(status->st_mode) && read_control("blockless"))
        status->st_blocks = 0;
    if (read_control("unlinked"))
        status->st_nlink = 0;
    return 0;
}

static int far_readdir(const char *path, void *out, fuse_fill_dir_t fill, off_t offset,
                       struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    (void)offset, (void)info, (void)flags;
    log_call("readdir");
    int fd = openat(source_fd, relative_path(path), O_RDONLY | O_DIRECTORY);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory)
        return -errno;
    for (struct dirent *entry; (entry = readdir(directory));)
        fill(out, entry->d_name, NULL, 0, 0);
    closedir(directory);
    return 0;
}

static int far_open(const char *path, struct fuse_file_info *info)
{
    log_call("open");
    int error = check_squashed_access(path, 4);
    if (error)
        return error;
    int fd = openat(source_fd, relative_path(path), info->flags & (O_ACCMODE | O_TRUNC));
    info->fh = fd;
    /* Else each open waits for all reads of others that are under way. */
    info->keep_cache = read_control("hold") != 0;
    /* Else the kernel takes what is short for the end, or makes it longer by zeros. */
    info->direct_io = read_control("short") || read_control("eintr") || read_control("longer");
    return fd < 0 ? -errno : 0;
}

static void wait_for_read(void)
{
    static atomic_int read_count;
    int waited_ms = 0, wait_ms = 0;
    if (read_count++ % 8 == 0)
        usleep(read_control("stalls") * 1000);
    while ((wait_ms = read_control("reads")) < 0 || waited_ms < wait_ms) {
        usleep(5000);
        waited_ms += 5;
    }
}

/* Where an image has what is not needed to start it: its small files and tables are at the end. */
static int is_held(int fd, off_t end)
{
    struct stat status;
    off_t hold_bytes = (off_t)read_control("hold") << 20;
    return hold_bytes && end > hold_bytes && !fstat(fd, &status) &&
           end <= status.st_size - (4 << 20);
}

static int far_read(const char *path, char *out, size_t size, off_t offset,
                    struct fuse_file_info *info)
{
    static atomic_int read_count;
    (void)path;
    log_call("read");
    wait_for_read();
    if (is_held(info->fh, offset + (off_t)size))
        log_call("held");
    while (is_held(info->fh, offset + (off_t)size))
        usleep(5000);
    int max_bytes = read_control("short"), interval = read_control("eintr");
    if (read_control("squash") == 2 && fuse_get_context()->uid == 0)
        return -EACCES;
    if (interval && ++read_count % interval == 0)
        return -EINTR;
    ssize_t count = pread(info->fh, out,
                          max_bytes && size > (size_t)max_bytes ? (size_t)max_bytes : size, offset);
    for (ssize_t index = offset < 4096 ? 4096 - offset : 0; index < count && read_control("forges");
         index++)
        out[index] ^= 1;
    return count < 0 ? -errno : count;
}

static off_t far_lseek(const char *path, off_t offset, int whence, struct fuse_file_info *info)
{
    struct stat status;
    off_t found = offset, later_bytes = (off_t)read_control("later") << 10;
    (void)path;
    log_call("lseek");
    if (fstat(info->fh, &status))
        return -errno;
    if (read_control("nodata") || later_bytes || read_control("same")) {
        if (later_bytes)
            found = whence == SEEK_DATA ? offset + later_bytes : status.st_size;
        return read_control("nodata") || offset >= status.st_size || found > status.st_size ? -ENXIO
                                                                                            : found;
    }
    found = lseek(info->fh, offset, whence);
    return found < 0 ? -errno : found;
}

static int far_flush(const char *path, struct fuse_file_info *info)
{
    /* close(2) asks the server, as on Lustre. */
    (void)path, (void)info;
    log_call("flush");
    return 0;
}

static int far_release(const char *path, struct fuse_file_info *info)
{
    (void)path;
    return close(info->fh) ? -errno : 0;
}

/* What was made is the caller's, who could make it: that is the kernel's to say. */
static int give_to_caller(const char *path, int result)
{
    struct fuse_context *caller = fuse_get_context();
    if (result < 0)
        return -errno;
    uid_t owner = caller->uid == 0 && read_control("squash") ? 65534 : caller->uid;
    fchownat(source_fd, relative_path(path), owner, caller->gid, AT_SYMLINK_NOFOLLOW);
    return 0;
}

static int far_create(const char *path, mode_t mode, struct fuse_file_info *info)
{
    log_call("create");
    int fd = openat(source_fd, relative_path(path), O_CREAT | (info->flags & (O_ACCMODE | O_EXCL)),
                    mode);
    info->fh = fd;
    if (fd >= 0)
        set_file_times(fd, path);
    return give_to_caller(path, fd);
}

static int far_write(const char *path, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *info)
{
    log_call("write");
    off_t quota_bytes = (off_t)read_control("quota") << 20;
    if (quota_bytes && offset + (off_t)size > quota_bytes)
        return -EDQUOT;
    ssize_t count = pwrite(info->fh, data, size, offset);
    set_file_times(info->fh, path);
    return count < 0 ? -errno : count;
}

static int far_mkdir(const char *path, mode_t mode)
{
    log_call("mkdir");
    return give_to_caller(path, mkdirat(source_fd, relative_path(path), mode));
}

static int far_unlink(const char *path)
{
    log_call("unlink");
    return unlinkat(source_fd, relative_path(path), 0) ? -errno : 0;
}

static int far_link(const char *path, const char *target)
{
    log_call("link");
    if (read_control("links"))
        return -EPERM;
    return linkat(source_fd, relative_path(path), source_fd, relative_path(target), 0) ? -errno : 0;
}

static int far_rename(const char *path, const char *target, unsigned int flags)
{
    log_call("rename");
    if (flags && read_control("links") == 2)
        return -EINVAL;
    return renameat2(source_fd, relative_path(path), source_fd, relative_path(target), flags)
               ? -errno
               : 0;
}

static int far_chmod(const char *path, mode_t mode, struct fuse_file_info *info)
{
    (void)info;
    return fchmodat(source_fd, relative_path(path), mode, 0) ? -errno : 0;
}

static int far_utimens(const char *path, const struct timespec times[2],
                       struct fuse_file_info *info)
{
    (void)info;
    if (utimensat(source_fd, relative_path(path), times, AT_SYMLINK_NOFOLLOW))
        return -errno;
    if (times[1].tv_nsec == UTIME_NOW)
        set_file_times(-1, path);
    return 0;
}

static int far_truncate(const char *path, off_t size, struct fuse_file_info *info)
{
    int fd = info ? -1 : openat(source_fd, relative_path(path), O_WRONLY);
    int error = ftruncate(info ? (int)info->fh : fd, size) ? -errno : 0;
    if (!info)
        close(fd);
    return error;
}

int main(int argc, char **argv)
{
    static const struct fuse_operations operations = {
        .init = far_init,
        .getattr = far_getattr,
        .readdir = far_readdir,
        .open = far_open,
        .read = far_read,
        .lseek = far_lseek,
        .flush = far_flush,
        .release = far_release,
        .create = far_create,
        .write = far_write,
        .mkdir = far_mkdir,
        .unlink = far_unlink,
        .link = far_link,
        .rename = far_rename,
        .chmod = far_chmod,
        .utimens = far_utimens,
        .truncate = far_truncate,
    };
    char calls_path[4096];
    if (argc != 5 || (source_fd = open(argv[1], O_PATH | O_DIRECTORY)) < 0) {
        fprintf(stderr, "usage: farfs FOLDER CONTROL MOUNTPOINT OPTIONS\n");
        return 2;
    }
    control_path = argv[2];
    snprintf(calls_path, sizeof calls_path, "%s.calls", control_path);
    if ((calls_fd = open(calls_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) < 0) {
        perror(calls_path);
        return 1;
    }
    char *options[] = {argv[0], "-o", argv[4]};
    struct fuse_args args = FUSE_ARGS_INIT(3, options);
    struct fuse *fuse = fuse_new(&args, &operations, sizeof operations, NULL);
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    /* As many threads as reads may wait, so that waiting reads keep nothing else waiting. */
    fuse_loop_cfg_set_max_threads(loop, 200);
    return !fuse || fuse_mount(fuse, argv[3]) || fuse_loop_mt(fuse, loop);
}
