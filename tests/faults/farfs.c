/* A shared file system for tests: shows a folder, and answers as slowly as it is told.
 *
 *     farfs FOLDER CONTROL MOUNTPOINT
 *
 * CONTROL is a file with the milliseconds that each read waits; -1 waits until it says otherwise.
 * To stop answering at all, stop the process. To be gone, kill it. */

#define _GNU_SOURCE /* O_PATH */
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int folder; /* all paths are relative to it */
static const char *control;

static const char *below(const char *path)
{
    return path[1] ? path + 1 : ".";
}

static void wait_as_told(void)
{
    int told = 0, waited = 0;
    do {
        FILE *file = fopen(control, "r");
        if (!file || fscanf(file, "%d", &told) != 1)
            told = 0;
        if (file)
            fclose(file);
        if (told >= 0 && waited >= told)
            return;
        usleep(5000);
        waited += 5;
    } while (1);
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
    (void)info;
    return fstatat(folder, below(path), facts, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

static int far_readdir(const char *path, void *out, fuse_fill_dir_t fill, off_t offset,
                       struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    (void)offset, (void)info, (void)flags;
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
    int fd = openat(folder, below(path), O_RDONLY);
    info->fh = fd;
    return fd < 0 ? -errno : 0;
}

static int far_read(const char *path, char *out, size_t size, off_t offset,
                    struct fuse_file_info *info)
{
    (void)path;
    wait_as_told();
    ssize_t count = pread(info->fh, out, size, offset);
    return count < 0 ? -errno : count;
}

static int far_flush(const char *path, struct fuse_file_info *info)
{
    /* close(2) asks the server, as on Lustre. */
    (void)path, (void)info;
    return 0;
}

static int far_release(const char *path, struct fuse_file_info *info)
{
    (void)path;
    return close(info->fh) ? -errno : 0;
}

int main(int argc, char **argv)
{
    static const struct fuse_operations operations = {
        .init = far_init,
        .getattr = far_getattr,
        .readdir = far_readdir,
        .open = far_open,
        .read = far_read,
        .flush = far_flush,
        .release = far_release,
    };
    if (argc != 4 || (folder = open(argv[1], O_PATH | O_DIRECTORY)) < 0) {
        fprintf(stderr, "usage: farfs FOLDER CONTROL MOUNTPOINT\n");
        return 2;
    }
    control = argv[2];
    char *options[] = {argv[0], "-oallow_other,default_permissions"};
    struct fuse_args args = FUSE_ARGS_INIT(2, options);
    struct fuse *fuse = fuse_new(&args, &operations, sizeof operations, NULL);
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    /* As many threads as reads may wait, so that waiting reads keep nothing else waiting. */
    fuse_loop_cfg_set_max_threads(loop, 200);
    return !fuse || fuse_mount(fuse, argv[3]) || fuse_loop_mt(fuse, loop);
}
