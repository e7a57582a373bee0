/* A wire between two network namespaces that takes its time: each frame comes out a fixed time after it went in.
   delay NAMESPACE_A DEVICE_A NAMESPACE_B DEVICE_B MICROSECONDS; makes both devices, which go with it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define FRAMES 2048 /* on the way in one direction; what comes then waits in the device's own queue */
#define LONGEST 9100 /* jumbo frames: each costs this program two calls, and the hosts' processors are its own */

struct way {
    int in, out;
    unsigned first, n;
    struct { long long due; int size; char bytes[LONGEST]; } frames[FRAMES];
};

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int device(const char *space, const char *name) {
    char path[256];
    struct ifreq asked = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    snprintf(path, sizeof path, "/var/run/netns/%s", space);
    int net = open(path, O_RDONLY), fd;
    if (net < 0 || setns(net, CLONE_NEWNET) || (fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK)) < 0) {
        perror(path);
        exit(1);
    }
    close(net);
    strncpy(asked.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, TUNSETIFF, &asked)) {
        perror(name);
        exit(1);
    }
    return fd;
}

static void carry(struct way *way, long long delay) {
    long long at = now();
    for (int size; way->n < FRAMES;) {
        unsigned last = (way->first + way->n) % FRAMES;
        if ((size = read(way->in, way->frames[last].bytes, LONGEST)) <= 0)
            break;
        way->frames[last].size = size;
        way->frames[last].due = at + delay;
        way->n++;
    }
    for (; way->n && way->frames[way->first].due <= now(); way->n--, way->first = (way->first + 1) % FRAMES)
        (void)!write(way->out, way->frames[way->first].bytes, way->frames[way->first].size); /* a device that is down loses it */
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    static struct way ways[2];
    ways[0].in = ways[1].out = device(argv[1], argv[2]);
    ways[1].in = ways[0].out = device(argv[3], argv[4]);
    long long delay = atoll(argv[5]) * 1000;
    prctl(PR_SET_TIMERSLACK, 1); /* ns; else each wait is 50 us longer */
    puts("there");
    fflush(stdout);
    for (;;) {
        long long wait = 1000000000LL;
        for (int i = 0; i < 2; i++) {
            carry(&ways[i], delay);
            if (ways[i].n) {
                long long left = ways[i].frames[ways[i].first].due - now();
                wait = left < wait ? (left > 0 ? left : 0) : wait;
            }
        }
        struct pollfd ends[2] = {{.fd = ways[0].in, .events = POLLIN}, {.fd = ways[1].in, .events = POLLIN}};
        struct timespec until = {.tv_sec = wait / 1000000000LL, .tv_nsec = wait % 1000000000LL};
        ppoll(ends, 2, &until, NULL);
    }
}
