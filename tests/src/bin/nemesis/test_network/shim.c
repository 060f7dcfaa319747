/* Loaded before libc into one process: its disk becomes slow or fails, its clocks jump or run at another pace, and it runs
 * out of descriptors, memory, room or threads.
 *
 * The file that FAULT_LEVERS names is mapped and shared with whoever pulls the levers. All are 64-bit numbers in the
 * machine's order; zeros change nothing. Monotonic time never runs backwards here either, whatever is pulled. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL

struct levers {
    /* Pulled from outside. */
    volatile int64_t sync_delay_ms;     /* before every fsync and fdatasync */
    volatile int64_t sync_errno;        /* instead of them */
    volatile int64_t wall_offset_s;     /* added to wall clocks */
    volatile int64_t pace_permille;     /* of monotonic clocks; 0 is 1000 */
    volatile int64_t monotonic_jump_ms; /* added to monotonic clocks, once for every rise */
    volatile int64_t open_errno;        /* instead of opening a file */
    volatile int64_t accept_errno;      /* instead of taking a connection */
    volatile int64_t thread_errno;      /* instead of starting a thread */
    /* What came of it. */
    int64_t delayed, failed, wall_reads, odd_reads, unopened, unaccepted, unstarted;
};

static struct levers none, *levers = &none;
static int (*real_clock)(clockid_t, struct timespec *);
static int (*real_fdatasync)(int);
static int (*real_fsync)(int);
static int (*real_epoll_wait)(int, struct epoll_event *, int, int);

__attribute__((constructor)) static void begin(void) {
    real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    real_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    real_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    real_epoll_wait = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
    const char *path = getenv("FAULT_LEVERS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) levers = mapped;
    close(file);
}

static int sync_as_told(int fd, int (*real)(int)) {
    if (levers->sync_errno) {
        __atomic_add_fetch(&levers->failed, 1, __ATOMIC_RELAXED);
        errno = (int)levers->sync_errno;
        return -1;
    }
    int64_t delay = levers->sync_delay_ms;
    if (delay > 0) {
        struct timespec left = {delay / 1000, delay % 1000 * 1000000};
        while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
        __atomic_add_fetch(&levers->delayed, 1, __ATOMIC_RELAXED);
    }
    return real(fd);
}

int fdatasync(int fd) { return sync_as_told(fd, real_fdatasync); }
int fsync(int fd) { return sync_as_told(fd, real_fsync); }

/* The error that a lever says, counted; 0 without one. */
static int refused(volatile int64_t *lever, int64_t *count) {
    int error = (int)*lever;
    if (error) __atomic_add_fetch(count, 1, __ATOMIC_RELAXED);
    return error;
}

static int open_as_told(int folder, const char *path, int flags, mode_t mode) {
    int error = refused(&levers->open_errno, &levers->unopened);
    if (!error) return (int)syscall(SYS_openat, folder, path, flags, mode);
    errno = error;
    return -1;
}

/* The mode is there only with these flags. */
#define MODE(flags, last, mode)                                 \
    mode_t mode = 0;                                            \
    if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list rest;                                           \
        va_start(rest, last);                                   \
        mode = va_arg(rest, mode_t);                            \
        va_end(rest);                                           \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, flags, mode)
    return open_as_told(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags, flags, mode)
    return open_as_told(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags, flags, mode)
    return open_as_told(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags, flags, mode)
    return open_as_told(folder, path, flags, mode);
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    int error = refused(&levers->accept_errno, &levers->unaccepted);
    if (!error) return (int)syscall(SYS_accept4, fd, address, length, flags);
    errno = error;
    return -1;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *with) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!real) real = (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
    int error = refused(&levers->thread_errno, &levers->unstarted);
    return error ? error : real(thread, attributes, run, with);
}

static int64_t pace(void) { return levers->pace_permille > 0 ? levers->pace_permille : 1000; }

/* From an anchor on, time passes at one pace; a lever that moved drops a new anchor. */
static pthread_mutex_t anchoring = PTHREAD_MUTEX_INITIALIZER;
static int64_t anchor_real, anchor_shown, anchor_pace = 1000, anchor_jump;

static int64_t shown(int64_t real) {
    pthread_mutex_lock(&anchoring);
    /* Another thread may have read the clock later and dropped the anchor since. */
    int64_t passed = real > anchor_real ? real - anchor_real : 0;
    int64_t now = anchor_shown + passed / 1000 * anchor_pace + passed % 1000 * anchor_pace / 1000;
    int64_t jump = levers->monotonic_jump_ms;
    if (pace() != anchor_pace || jump != anchor_jump) {
        if (jump > anchor_jump) now += (jump - anchor_jump) * 1000000;
        anchor_real = real > anchor_real ? real : anchor_real;
        anchor_shown = now;
        anchor_pace = pace();
        anchor_jump = jump;
    }
    if (anchor_pace != 1000) __atomic_add_fetch(&levers->odd_reads, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&anchoring);
    return now;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int done = real_clock ? real_clock(clock, time) : (int)syscall(SYS_clock_gettime, clock, time);
    if (done != 0) return done;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        time->tv_sec += levers->wall_offset_s;
        if (levers->wall_offset_s) __atomic_add_fetch(&levers->wall_reads, 1, __ATOMIC_RELAXED);
    } else if (clock == CLOCK_MONOTONIC) {
        int64_t now = shown(time->tv_sec * BILLION + time->tv_nsec);
        time->tv_sec = now / BILLION;
        time->tv_nsec = now % BILLION;
    }
    return 0;
}

/* A timer is set by the clock that the process sees, and must go off by that one. */
int epoll_wait(int fd, struct epoll_event *events, int most, int timeout_ms) {
    if (timeout_ms > 0) timeout_ms = (int)(((int64_t)timeout_ms * 1000 + pace() - 1) / pace());
    return real_epoll_wait(fd, events, most, timeout_ms);
}
