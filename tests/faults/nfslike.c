/* A shared file system for tests, with what NFS keeps: shows a folder, read-only.
 *
 *     nfslike FOLDER MOUNTPOINT [promised]
 *
 * The kernel keeps attributes, names and listings for an hour. A file is asked for anew when it is
 * opened (close-to-open), and when statx(2) says AT_STATX_FORCE_SYNC. When a folder is asked for,
 * and has changed, its names count no more, as NFS has it of their verifiers. An inode that is
 * asked for answers for itself, whatever has its name by now. With `promised` an open asks nothing:
 * so it is while an NFS server has promised this client to tell of changes (a delegation). */

#define _GNU_SOURCE /* O_PATH */
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HOUR 3600.0

struct node {
    int fd;
    ino_t inode;
    struct timespec known_mtime; /* a folder's mtime, when it was last asked for */
    struct node *next;
};

static struct node root;
static struct fuse_session *session;
static int has_delegation;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static struct node *find_node(fuse_ino_t number)
{
    return number == FUSE_ROOT_ID ? &root : (struct node *)number;
}

static fuse_ino_t find_number(struct node *node)
{
    return node == &root ? FUSE_ROOT_ID : (fuse_ino_t)node;
}

static int stat_node(struct node *node, struct stat *status)
{
    return fstatat(node->fd, "", status, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
}

static void nfs_init(void *data, struct fuse_conn_info *conn)
{
    (void)data;
    conn->want &= ~(FUSE_CAP_READDIRPLUS | FUSE_CAP_AUTO_INVAL_DATA);
}

static void nfs_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry = {.attr_timeout = HOUR, .entry_timeout = HOUR};
    int fd = openat(find_node(parent)->fd, name, O_PATH | O_NOFOLLOW);
    if (fd < 0 || fstatat(fd, "", &entry.attr, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW)) {
        fuse_reply_err(req, errno);
        return;
    }
    pthread_mutex_lock(&mutex);
    struct node *node = root.next;
    while (node && node->inode != entry.attr.st_ino)
        node = node->next;
    if (node) {
        close(fd);
    } else {
        node = calloc(1, sizeof *node);
        *node = (struct node){fd, entry.attr.st_ino, entry.attr.st_mtim, root.next};
        root.next = node;
    }
    pthread_mutex_unlock(&mutex);
    entry.ino = find_number(node);
    fuse_reply_entry(req, &entry);
}

/* Has the kernel look all names of a folder up anew. */
static void invalidate_names(struct node *node)
{
    int fd = openat(node->fd, ".", O_RDONLY | O_DIRECTORY);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        fuse_lowlevel_notify_inval_entry(session, find_number(node), entry->d_name,
                                         strlen(entry->d_name));
    if (directory)
        closedir(directory);
}

static void nfs_getattr(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    struct node *node = find_node(number);
    struct stat status;
    (void)info;
    if (stat_node(node, &status)) {
        fuse_reply_err(req, errno);
        return;
    }
    if (S_ISDIR(status.st_mode)) {
        pthread_mutex_lock(&mutex);
        int has_changed = memcmp(&node->known_mtime, &status.st_mtim, sizeof node->known_mtime);
        node->known_mtime = status.st_mtim;
        pthread_mutex_unlock(&mutex);
        if (has_changed)
            invalidate_names(node);
    }
    fuse_reply_attr(req, &status, HOUR);
}

static void nfs_readlink(fuse_req_t req, fuse_ino_t number)
{
    char target[4096];
    ssize_t size = readlinkat(find_node(number)->fd, "", target, sizeof target - 1);
    if (size < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    target[size] = 0;
    fuse_reply_readlink(req, target);
}

static void nfs_open(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", find_node(number)->fd);
    int fd = open(path, O_RDONLY);
    info->fh = fd;
    if (fd < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    if (!has_delegation)
        fuse_lowlevel_notify_inval_inode(session, number, -1, 0);
    fuse_reply_open(req, info);
}

static void nfs_read(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
                     struct fuse_file_info *info)
{
    char *data = malloc(size);
    ssize_t count = pread(info->fh, data, size, offset);
    (void)number;
    if (count < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_buf(req, data, count);
    free(data);
}

static void nfs_release(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    (void)number;
    close(info->fh);
    fuse_reply_err(req, 0);
}

static void nfs_opendir(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    (void)number;
    info->cache_readdir = info->keep_cache = 1;
    fuse_reply_open(req, info);
}

static void nfs_readdir(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
                        struct fuse_file_info *info)
{
    int fd = openat(find_node(number)->fd, ".", O_RDONLY | O_DIRECTORY);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    char *data = malloc(size);
    size_t used_bytes = 0;
    (void)info;
    if (directory && offset)
        seekdir(directory, offset);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        struct stat status = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
        size_t entry_bytes = fuse_add_direntry(req, data + used_bytes, size - used_bytes,
                                               entry->d_name, &status, telldir(directory));
        if (entry_bytes > size - used_bytes)
            break;
        used_bytes += entry_bytes;
    }
    if (directory)
        closedir(directory);
    fuse_reply_buf(req, data, used_bytes);
    free(data);
}

int main(int argc, char **argv)
{
    static const struct fuse_lowlevel_ops operations = {
        .init = nfs_init,
        .lookup = nfs_lookup,
        .getattr = nfs_getattr,
        .readlink = nfs_readlink,
        .open = nfs_open,
        .read = nfs_read,
        .release = nfs_release,
        .opendir = nfs_opendir,
        .readdir = nfs_readdir,
    };
    /* ro: else each listing has the kernel ask for the folder's atime, and so for all else. */
    char *options[] = {argv[0], "-o", "allow_other,default_permissions,ro"};
    struct fuse_args args = FUSE_ARGS_INIT(3, options);
    struct stat status;
    has_delegation = argc == 4 && !strcmp(argv[3], "promised");
    if (argc != 3 + has_delegation || (root.fd = open(argv[1], O_PATH | O_DIRECTORY)) < 0) {
        fprintf(stderr, "usage: nfslike FOLDER MOUNTPOINT [promised]\n");
        return 2;
    }
    stat_node(&root, &status);
    root.known_mtime = status.st_mtim;
    session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    return !session || fuse_session_mount(session, argv[2]) || fuse_session_loop_mt(session, loop);
}
