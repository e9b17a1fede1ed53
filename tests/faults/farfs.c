/* A shared file system for tests: shows a folder, as slowly and as oddly as it is told.
 *
 *     farfs FOLDER CONTROL MOUNTPOINT OPTIONS
 *
 * CONTROL is a file with words and numbers, read anew at each call; see `told` below for the words.
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

static int folder; /* all paths are relative to it */
static int calls;  /* the file of names */
static const char *control;

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
static int told(const char *wanted)
{
    char word[32];
    int number, found = 0;
    FILE *file = fopen(control, "r");
    while (file && !found && fscanf(file, "%31s %d", word, &number) == 2)
        if (!strcmp(word, wanted))
            found = number;
    if (file)
        fclose(file);
    return found;
}

static const char *below(const char *path)
{
    return path[1] ? path + 1 : ".";
}

static void begin(const char *name)
{
    dprintf(calls, "%s\n", name);
    usleep(told("delay") * 1000);
}

/* Whether root, being nobody, gets through the folders above and has these rights itself. */
static int squashed(const char *path, mode_t rights)
{
    struct stat facts;
    char above[4096];
    if (fuse_get_context()->uid != 0 || !told("squash"))
        return 0;
    for (const char *at = path; (at = strchr(at + 1, '/'));) {
        snprintf(above, sizeof above, "%.*s", (int)(at - path), path);
        if (fstatat(folder, below(above), &facts, 0) || !(facts.st_mode & 1))
            return -EACCES;
    }
    if (rights && (fstatat(folder, below(path), &facts, 0) || !(facts.st_mode & rights)))
        return -EACCES;
    return 0;
}

/* Where nodes and no server set the times: what happened to a file now happened by our clock. */
static void set_times(int fd, const char *path)
{
    int seconds = told("ahead");
    struct timespec times[2];
    if (!seconds)
        return;
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec += seconds;
    times[1] = times[0];
    if (fd >= 0)
        futimens(fd, times);
    else
        utimensat(folder, below(path), times, AT_SYMLINK_NOFOLLOW);
}

static void *far_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    (void)conn;
    config->use_ino = 1;
    /* Nothing is kept by the kernel: each look comes here. */
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
    return NULL;
}

static int far_getattr(const char *path, struct stat *facts, struct fuse_file_info *info)
{
    static atomic_int looks;
    begin("getattr");
    /* Of a file that somebody has opened, as over NFS: no folder is in the way. */
    int error = info && told("squash") == 1 ? 0 : squashed(path, 0);
    if (error)
        return error;
    if (info ? fstat(info->fh, facts) : fstatat(folder, below(path), facts, AT_SYMLINK_NOFOLLOW))
        return -errno;
    if (told("seconds"))
        facts->st_mtim.tv_nsec = facts->st_ctim.tv_nsec = 0;
    facts->st_mtim.tv_sec -= told("ago");
    facts->st_ctim.tv_sec -= told("ago");
    if (told("inodes"))
        facts->st_ino += 1000 * ++looks;
    if (told("alike") && S_ISREG(facts->st_mode)) {
        facts->st_ino = 77;
        facts->st_nlink = 2;
        facts->st_mtim = facts->st_ctim = (struct timespec){1000000000, 0};
    }
    if (S_ISREG(facts->st_mode))
        facts->st_size += told("longer");
    if (S_ISREG(facts->st_mode) && told("blockless"))
        facts->st_blocks = 0;
    if (told("unlinked"))
        facts->st_nlink = 0;
    return 0;
}

static int far_readdir(const char *path, void *out, fuse_fill_dir_t fill, off_t offset,
                       struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    (void)offset, (void)info, (void)flags;
    begin("readdir");
    int fd = openat(folder, below(path), O_RDONLY | O_DIRECTORY);
    DIR *open = fd < 0 ? NULL : fdopendir(fd);
    if (!open)
        return -errno;
    for (struct dirent *entry; (entry = readdir(open));)
        fill(out, entry->d_name, NULL, 0, 0);
    closedir(open);
    return 0;
}

static int far_open(const char *path, struct fuse_file_info *info)
{
    begin("open");
    int error = squashed(path, 4);
    if (error)
        return error;
    int fd = openat(folder, below(path), info->flags & (O_ACCMODE | O_TRUNC));
    info->fh = fd;
    /* Else each open waits for all reads of others that are under way. */
    info->keep_cache = told("hold") != 0;
    /* Else the kernel takes what is short for the end, or makes it longer by zeros. */
    info->direct_io = told("short") || told("eintr") || told("longer");
    return fd < 0 ? -errno : 0;
}

static void wait_as_told(void)
{
    static atomic_int reads;
    int waited = 0, wait = 0;
    if (reads++ % 8 == 0)
        usleep(told("stalls") * 1000);
    while ((wait = told("reads")) < 0 || waited < wait) {
        usleep(5000);
        waited += 5;
    }
}

/* Where an image has what is not needed to start it: its small files and tables are at the end. */
static int is_held(int fd, off_t end)
{
    struct stat facts;
    off_t from = (off_t)told("hold") << 20;
    return from && end > from && !fstat(fd, &facts) && end <= facts.st_size - (4 << 20);
}

static int far_read(const char *path, char *out, size_t size, off_t offset,
                    struct fuse_file_info *info)
{
    static atomic_int reads;
    (void)path;
    begin("read");
    wait_as_told();
    if (is_held(info->fh, offset + (off_t)size))
        begin("held");
    while (is_held(info->fh, offset + (off_t)size))
        usleep(5000);
    int most = told("short"), each = told("eintr");
    if (told("squash") == 2 && fuse_get_context()->uid == 0)
        return -EACCES;
    if (each && ++reads % each == 0)
        return -EINTR;
    ssize_t count = pread(info->fh, out, most && size > (size_t)most ? (size_t)most : size, offset);
    for (ssize_t at = offset < 4096 ? 4096 - offset : 0; at < count && told("forges"); at++)
        out[at] ^= 1;
    return count < 0 ? -errno : count;
}

static off_t far_lseek(const char *path, off_t offset, int whence, struct fuse_file_info *info)
{
    struct stat facts;
    off_t found = offset, later = (off_t)told("later") << 10;
    (void)path;
    begin("lseek");
    if (fstat(info->fh, &facts))
        return -errno;
    if (told("nodata") || later || told("same")) {
        if (later)
            found = whence == SEEK_DATA ? offset + later : facts.st_size;
        return told("nodata") || offset >= facts.st_size || found > facts.st_size ? -ENXIO : found;
    }
    found = lseek(info->fh, offset, whence);
    return found < 0 ? -errno : found;
}

static int far_flush(const char *path, struct fuse_file_info *info)
{
    /* close(2) asks the server, as on Lustre. */
    (void)path, (void)info;
    begin("flush");
    return 0;
}

static int far_release(const char *path, struct fuse_file_info *info)
{
    (void)path;
    return close(info->fh) ? -errno : 0;
}

/* What was made is the caller's, who could make it: that is the kernel's to say. */
static int made(const char *path, int result)
{
    struct fuse_context *caller = fuse_get_context();
    if (result < 0)
        return -errno;
    uid_t nobody = caller->uid == 0 && told("squash") ? 65534 : caller->uid;
    fchownat(folder, below(path), nobody, caller->gid, AT_SYMLINK_NOFOLLOW);
    return 0;
}

static int far_create(const char *path, mode_t mode, struct fuse_file_info *info)
{
    begin("create");
    int fd = openat(folder, below(path), O_CREAT | (info->flags & (O_ACCMODE | O_EXCL)), mode);
    info->fh = fd;
    if (fd >= 0)
        set_times(fd, path);
    return made(path, fd);
}

static int far_write(const char *path, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *info)
{
    begin("write");
    off_t most = (off_t)told("quota") << 20;
    if (most && offset + (off_t)size > most)
        return -EDQUOT;
    ssize_t count = pwrite(info->fh, data, size, offset);
    set_times(info->fh, path);
    return count < 0 ? -errno : count;
}

static int far_mkdir(const char *path, mode_t mode)
{
    begin("mkdir");
    return made(path, mkdirat(folder, below(path), mode));
}

static int far_unlink(const char *path)
{
    begin("unlink");
    return unlinkat(folder, below(path), 0) ? -errno : 0;
}

static int far_link(const char *path, const char *other)
{
    begin("link");
    if (told("links"))
        return -EPERM;
    return linkat(folder, below(path), folder, below(other), 0) ? -errno : 0;
}

static int far_rename(const char *path, const char *other, unsigned int flags)
{
    begin("rename");
    if (flags && told("links") == 2)
        return -EINVAL;
    return renameat2(folder, below(path), folder, below(other), flags) ? -errno : 0;
}

static int far_chmod(const char *path, mode_t mode, struct fuse_file_info *info)
{
    (void)info;
    return fchmodat(folder, below(path), mode, 0) ? -errno : 0;
}

static int far_utimens(const char *path, const struct timespec times[2],
                       struct fuse_file_info *info)
{
    (void)info;
    if (utimensat(folder, below(path), times, AT_SYMLINK_NOFOLLOW))
        return -errno;
    if (times[1].tv_nsec == UTIME_NOW)
        set_times(-1, path);
    return 0;
}

static int far_truncate(const char *path, off_t size, struct fuse_file_info *info)
{
    int fd = info ? -1 : openat(folder, below(path), O_WRONLY);
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
    char names[4096];
    if (argc != 5 || (folder = open(argv[1], O_PATH | O_DIRECTORY)) < 0) {
        fprintf(stderr, "usage: farfs FOLDER CONTROL MOUNTPOINT OPTIONS\n");
        return 2;
    }
    control = argv[2];
    snprintf(names, sizeof names, "%s.calls", control);
    if ((calls = open(names, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) < 0) {
        perror(names);
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
