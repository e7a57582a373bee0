/* Preloaded into a process: its wall clock is off by MA_SKEW_S seconds, if that is set, and by the number in MA_SKEW_FILE (eight
   bytes, which may change at any time); the monotonic clock is not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long set_since(void) {
    static volatile long *told;
    const char *path = told ? NULL : getenv("MA_SKEW_FILE");
    if (path) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (found != MAP_FAILED) told = found;
    }
    return told ? *told : 0;
}

static long skew(void) {
    const char *text = getenv("MA_SKEW_S");
    return (text ? atol(text) : 0) + set_since();
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *); /* which asks no kernel: a warm server's processes all come by here */
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, out);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += skew();
    return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
