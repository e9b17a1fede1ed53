/* A file server far away, for bench/data: shows a folder, read-only.
 *
 *     data_source FOLDER MOUNTPOINT LATENCY_US BYTES_PER_SECOND
 *
 * Each lookup, stat, open, getxattr, readlink, and each 128 KiB of a listing, takes LATENCY_US longer
 * than here; all reads together get BYTES_PER_SECOND (0: no limit), and each takes LATENCY_US too.
 * Requests wait side by side, but for lookups in one folder: libfuse 3.14 knows of parallel ones and
 * does not tell the kernel. The kernel keeps attributes and names for a second, as NFS does at
 * least (acregmin is 3 s), and file contents until the file changes. No readdirplus: a listing brings
 * names only. ctime is mtime. */

#define _GNU_SOURCE /* O_PATH */
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL

static int source_fd; /* all paths are relative to it */
static long long latency_ns, bytes_per_second;

static long long read_monotonic_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND_NS + time.tv_nsec;
}

static void wait_until(long long deadline_ns)
{
    struct timespec time = {deadline_ns / SECOND_NS, deadline_ns % SECOND_NS};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
        ;
}

static void wait_latency(void)
{
    wait_until(read_monotonic_ns() + latency_ns);
}

/* Waits for a read's turn: the line is free again once all that was asked before has gone over it. */
static void wait_for_transfer(size_t size)
{
    static pthread_mutex_t line_mutex = PTHREAD_MUTEX_INITIALIZER;
    static long long line_free_ns;
    long long arrival_ns = read_monotonic_ns() + latency_ns;
    if (bytes_per_second) {
        pthread_mutex_lock(&line_mutex);
        if (line_free_ns < read_monotonic_ns())
            line_free_ns = read_monotonic_ns();
        line_free_ns += (long long)size * SECOND_NS / bytes_per_second;
        if (arrival_ns < line_free_ns)
            arrival_ns = line_free_ns;
        pthread_mutex_unlock(&line_mutex);
    }
    wait_until(arrival_ns);
}

static const char *relative_path(const char *path)
{
    return path[1] ? path + 1 : ".";
}

static void *source_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    conn->want &= ~(unsigned)(FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO);
    config->use_ino = 1;
    config->entry_timeout = config->attr_timeout = 1;
    return NULL;
}

static int source_getattr(const char *path, struct stat *status, struct fuse_file_info *info)
{
    wait_latency();
    if (info ? fstat(info->fh, status)
             : fstatat(source_fd, relative_path(path), status, AT_SYMLINK_NOFOLLOW))
        return -errno;
    status->st_ctim = status->st_mtim; /* nothing is new here: of what is, copies wait to settle */
    return 0;
}

static int source_readlink(const char *path, char *out, size_t size)
{
    wait_latency();
    ssize_t count = readlinkat(source_fd, relative_path(path), out, size - 1);
    if (count < 0)
        return -errno;
    out[count] = 0;
    return 0;
}

static int source_readdir(const char *path, void *out, fuse_fill_dir_t fill, off_t offset,
                          struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    (void)offset, (void)info, (void)flags;
    wait_latency();
    int fd = openat(source_fd, relative_path(path), O_RDONLY | O_DIRECTORY);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory)
        return -errno;
    for (struct dirent *entry; (entry = readdir(directory));)
        fill(out, entry->d_name, NULL, 0, 0);
    closedir(directory);
    return 0;
}

static int source_open(const char *path, struct fuse_file_info *info)
{
    wait_latency();
    int fd = openat(source_fd, relative_path(path), O_RDONLY);
    info->fh = (uint64_t)fd;
    info->keep_cache = 1;
    return fd < 0 ? -errno : 0;
}

static int source_read(const char *path, struct fuse_bufvec **out, size_t size, off_t offset,
                       struct fuse_file_info *info)
{
    (void)path;
    struct stat status;
    if (fstat(info->fh, &status))
        return -errno;
    if (offset >= status.st_size)
        size = 0;
    else if (size > (size_t)(status.st_size - offset))
        size = (size_t)(status.st_size - offset);
    wait_for_transfer(size);
    struct fuse_bufvec *buffer = malloc(sizeof *buffer);
    if (!buffer)
        return -ENOMEM;
    *buffer = FUSE_BUFVEC_INIT(size);
    buffer->buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    buffer->buf[0].fd = (int)info->fh;
    buffer->buf[0].pos = offset;
    *out = buffer;
    return 0;
}

static int source_release(const char *path, struct fuse_file_info *info)
{
    (void)path;
    return close((int)info->fh) ? -errno : 0;
}

static int source_getxattr(const char *path, const char *name, char *value, size_t size)
{
    wait_latency();
    int fd = openat(source_fd, relative_path(path), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    ssize_t count = fd < 0 ? -1 : fgetxattr(fd, name, value, size);
    int error = errno;
    if (fd >= 0)
        close(fd);
    return count < 0 ? -error : (int)count;
}

int main(int argc, char **argv)
{
    static const struct fuse_operations operations = {
        .init = source_init,
        .getattr = source_getattr,
        .readlink = source_readlink,
        .readdir = source_readdir,
        .open = source_open,
        .read_buf = source_read,
        .release = source_release,
        .getxattr = source_getxattr,
    };
    if (argc != 5 || (source_fd = open(argv[1], O_PATH | O_DIRECTORY)) < 0) {
        fprintf(stderr, "usage: data_source FOLDER MOUNTPOINT LATENCY_US BYTES_PER_SECOND\n");
        return 2;
    }
    latency_ns = atoll(argv[3]) * 1000;
    bytes_per_second = atoll(argv[4]);
    prctl(PR_SET_TIMERSLACK, 1UL); /* of the threads too: else each sleep is 50 us longer */
    char *options[] = {argv[0], "-o", "ro,allow_other,default_permissions"};
    struct fuse_args args = FUSE_ARGS_INIT(3, options);
    struct fuse *fuse = fuse_new(&args, &operations, sizeof operations, NULL);
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(loop, 200);
    fuse_loop_cfg_set_idle_threads(loop, 64);
    return !fuse || fuse_mount(fuse, argv[2]) || fuse_loop_mt(fuse, loop);
}
