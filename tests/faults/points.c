/* Counts what a process does to the files below some directories, and fails the n-th of it.
 *
 * Preloaded (LD_PRELOAD), so that libav, the Rust of safetensors and sqlite are counted as Python is. Before each counted
 * call, `faults_observe`'s function is called, if there is one: what lies on the disk then is what a kill would leave.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE, OPEN, READ, MAP, WRITE, RENAME, FSYNC, KINDS };

static char roots[64][PATH_MAX];
static int root_count;
static long counts[KINDS];
static int armed_kind = -1, armed_error, armed_sticky;
static long armed_number;
static void (*observer)(int kind);
static __thread int inside;

void faults_watch(const char *root) { strncpy(roots[root_count++], root, PATH_MAX - 1); }

void faults_observe(void (*function)(int kind)) { observer = function; }

/* Fails call `number`, from 1, of a kind with `error`; if `sticky`, all later ones too. A negative error is a signal that
 * this process gets instead. Counts begin anew. */
void faults_arm(int kind, long number, int error, int sticky) {
    memset(counts, 0, sizeof counts);
    armed_kind = kind, armed_number = number, armed_error = error, armed_sticky = sticky;
}

long faults_count(int kind) { return counts[kind]; }

static int is_watched(const char *path) {
    for (int at = 0; at < root_count; at++) {
        size_t length = strlen(roots[at]);
        if (!strncmp(path, roots[at], length) && (path[length] == '/' || path[length] == '\0')) return 1;
    }
    return 0;
}

static int is_watched_at(int directory, const char *path) {
    char whole[2 * PATH_MAX];
    if (path == NULL) return 0;
    if (path[0] == '/') return is_watched(path);
    if (directory == AT_FDCWD) {
        if (getcwd(whole, PATH_MAX) == NULL) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, whole, PATH_MAX - 1);
        if (length < 0) return 0;
        whole[length] = '\0';
    }
    strcat(whole, "/");
    strncat(whole, path, PATH_MAX - 1);
    return is_watched(whole);
}

static int is_watched_descriptor(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = '\0';
    return is_watched(path);
}

/* Counts a call; returns 1 where it is to fail, with errno set. */
static int fails(int kind) {
    if (observer != NULL) {
        int before = errno;
        inside = 1;
        observer(kind);
        inside = 0;
        errno = before;
    }
    long number = __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != armed_kind || (armed_sticky ? number < armed_number : number != armed_number)) return 0;
    if (armed_error < 0) kill(getpid(), -armed_error);
    errno = armed_error;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int open_kind(int flags) { return flags & (O_CREAT | __O_TMPFILE) ? CREATE : OPEN; }

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        MODE(flags) \
        if (!inside && root_count && is_watched_at(AT_FDCWD, path) && fails(open_kind(flags))) return -1; \
        return real(path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(name); \
        MODE(flags) \
        if (!inside && root_count && is_watched_at(directory, path) && fails(open_kind(flags))) return -1; \
        return real(directory, path, flags, mode); \
    }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    if (!inside && root_count && is_watched_at(AT_FDCWD, path) && fails(CREATE)) return -1;
    return real(path, mode);
}

ssize_t read(int file, void *buffer, size_t size) {
    REAL(read);
    if (!inside && root_count && is_watched_descriptor(file) && fails(READ)) return -1;
    return real(file, buffer, size);
}

#define DEFINE_PREAD(name, offset_type) \
    ssize_t name(int file, void *buffer, size_t size, offset_type offset) { \
        REAL(name); \
        if (!inside && root_count && is_watched_descriptor(file) && fails(READ)) return -1; \
        return real(file, buffer, size, offset); \
    }
DEFINE_PREAD(pread, off_t)
DEFINE_PREAD(pread64, off64_t)

#define DEFINE_MMAP(name, offset_type) \
    void *name(void *address, size_t size, int protection, int flags, int file, offset_type offset) { \
        REAL(name); \
        if (!inside && root_count && file >= 0 && is_watched_descriptor(file) && fails(MAP)) return MAP_FAILED; \
        return real(address, size, protection, flags, file, offset); \
    }
DEFINE_MMAP(mmap, off_t)
DEFINE_MMAP(mmap64, off64_t)

/* On a full disk the first half may still fit. */
ssize_t write(int file, const void *buffer, size_t size) {
    REAL(write);
    if (!inside && root_count && is_watched_descriptor(file) && fails(WRITE)) {
        int error = errno;
        if (armed_sticky && counts[WRITE] == armed_number && size > 1) return real(file, buffer, size / 2);
        errno = error;
        return -1;
    }
    return real(file, buffer, size);
}

#define DEFINE_PWRITE(name, offset_type) \
    ssize_t name(int file, const void *buffer, size_t size, offset_type offset) { \
        REAL(name); \
        if (!inside && root_count && is_watched_descriptor(file) && fails(WRITE)) return -1; \
        return real(file, buffer, size, offset); \
    }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    if (!inside && root_count && is_watched_descriptor(file) && fails(WRITE)) return -1;
    return real(file, parts, count);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (!inside && root_count && is_watched_at(AT_FDCWD, to) && fails(RENAME)) return -1;
    return real(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(renameat);
    if (!inside && root_count && is_watched_at(to_directory, to) && fails(RENAME)) return -1;
    return real(from_directory, from, to_directory, to);
}

int fsync(int file) {
    REAL(fsync);
    if (!inside && root_count && is_watched_descriptor(file) && fails(FSYNC)) return -1;
    return real(file);
}

int fdatasync(int file) {
    REAL(fdatasync);
    if (!inside && root_count && is_watched_descriptor(file) && fails(FSYNC)) return -1;
    return real(file);
}
