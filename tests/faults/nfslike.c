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
    struct timespec seen; /* a folder's mtime, when it was last asked for */
    struct node *next;
};

static struct node top;
static struct fuse_session *session;
static int promised;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static struct node *node_of(fuse_ino_t number)
{
    return number == FUSE_ROOT_ID ? &top : (struct node *)number;
}

static fuse_ino_t number_of(struct node *node)
{
    return node == &top ? FUSE_ROOT_ID : (fuse_ino_t)node;
}

static int facts_of(struct node *node, struct stat *facts)
{
    return fstatat(node->fd, "", facts, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
}

static void l_init(void *data, struct fuse_conn_info *conn)
{
    (void)data;
    conn->want &= ~(FUSE_CAP_READDIRPLUS | FUSE_CAP_AUTO_INVAL_DATA);
}

static void l_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry = {.attr_timeout = HOUR, .entry_timeout = HOUR};
    int fd = openat(node_of(parent)->fd, name, O_PATH | O_NOFOLLOW);
    if (fd < 0 || fstatat(fd, "", &entry.attr, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW)) {
        fuse_reply_err(req, errno);
        return;
    }
    pthread_mutex_lock(&mutex);
    struct node *node = top.next;
    while (node && node->inode != entry.attr.st_ino)
        node = node->next;
    if (node) {
        close(fd);
    } else {
        node = calloc(1, sizeof *node);
        *node = (struct node){fd, entry.attr.st_ino, entry.attr.st_mtim, top.next};
        top.next = node;
    }
    pthread_mutex_unlock(&mutex);
    entry.ino = number_of(node);
    fuse_reply_entry(req, &entry);
}

/* Has the kernel look all names of a folder up anew. */
static void forget_names(struct node *node)
{
    int fd = openat(node->fd, ".", O_RDONLY | O_DIRECTORY);
    DIR *open = fd < 0 ? NULL : fdopendir(fd);
    for (struct dirent *one; open && (one = readdir(open));)
        fuse_lowlevel_notify_inval_entry(session, number_of(node), one->d_name,
                                         strlen(one->d_name));
    if (open)
        closedir(open);
}

static void l_getattr(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    struct node *node = node_of(number);
    struct stat facts;
    (void)info;
    if (facts_of(node, &facts)) {
        fuse_reply_err(req, errno);
        return;
    }
    if (S_ISDIR(facts.st_mode)) {
        pthread_mutex_lock(&mutex);
        int changed = memcmp(&node->seen, &facts.st_mtim, sizeof node->seen);
        node->seen = facts.st_mtim;
        pthread_mutex_unlock(&mutex);
        if (changed)
            forget_names(node);
    }
    fuse_reply_attr(req, &facts, HOUR);
}

static void l_readlink(fuse_req_t req, fuse_ino_t number)
{
    char leads[4096];
    ssize_t size = readlinkat(node_of(number)->fd, "", leads, sizeof leads - 1);
    if (size < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    leads[size] = 0;
    fuse_reply_readlink(req, leads);
}

static void l_open(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", node_of(number)->fd);
    int fd = open(path, O_RDONLY);
    info->fh = fd;
    if (fd < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    if (!promised)
        fuse_lowlevel_notify_inval_inode(session, number, -1, 0);
    fuse_reply_open(req, info);
}

static void l_read(fuse_req_t req, fuse_ino_t number, size_t size, off_t at,
                   struct fuse_file_info *info)
{
    char *data = malloc(size);
    ssize_t count = pread(info->fh, data, size, at);
    (void)number;
    if (count < 0)
        fuse_reply_err(req, errno);
    else
        fuse_reply_buf(req, data, count);
    free(data);
}

static void l_release(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    (void)number;
    close(info->fh);
    fuse_reply_err(req, 0);
}

static void l_opendir(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *info)
{
    (void)number;
    info->cache_readdir = info->keep_cache = 1;
    fuse_reply_open(req, info);
}

static void l_readdir(fuse_req_t req, fuse_ino_t number, size_t size, off_t at,
                      struct fuse_file_info *info)
{
    int fd = openat(node_of(number)->fd, ".", O_RDONLY | O_DIRECTORY);
    DIR *open = fd < 0 ? NULL : fdopendir(fd);
    char *data = malloc(size);
    size_t used = 0;
    (void)info;
    if (open && at)
        seekdir(open, at);
    for (struct dirent *one; open && (one = readdir(open));) {
        struct stat facts = {.st_ino = one->d_ino, .st_mode = DTTOIF(one->d_type)};
        size_t more = fuse_add_direntry(req, data + used, size - used, one->d_name, &facts,
                                        telldir(open));
        if (more > size - used)
            break;
        used += more;
    }
    if (open)
        closedir(open);
    fuse_reply_buf(req, data, used);
    free(data);
}

int main(int argc, char **argv)
{
    static const struct fuse_lowlevel_ops operations = {
        .init = l_init,
        .lookup = l_lookup,
        .getattr = l_getattr,
        .readlink = l_readlink,
        .open = l_open,
        .read = l_read,
        .release = l_release,
        .opendir = l_opendir,
        .readdir = l_readdir,
    };
    /* ro: else each listing has the kernel ask for the folder's atime, and so for all else. */
    char *options[] = {argv[0], "-o", "allow_other,default_permissions,ro"};
    struct fuse_args args = FUSE_ARGS_INIT(3, options);
    struct stat facts;
    promised = argc == 4 && !strcmp(argv[3], "promised");
    if (argc != 3 + promised || (top.fd = open(argv[1], O_PATH | O_DIRECTORY)) < 0) {
        fprintf(stderr, "usage: nfslike FOLDER MOUNTPOINT [promised]\n");
        return 2;
    }
    facts_of(&top, &facts);
    top.seen = facts.st_mtim;
    session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    return !session || fuse_session_mount(session, argv[2]) || fuse_session_loop_mt(session, loop);
}
