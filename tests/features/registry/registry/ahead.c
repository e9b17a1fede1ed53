/* For LD_PRELOAD: this process' wall clock is $AHEAD seconds ahead; the kernel's, which sets the
 * times of files, is right. */

#define _GNU_SOURCE /* syscall */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const char *ahead_s = getenv("AHEAD");
    int error = (int)syscall(SYS_clock_gettime, clock, now);
    if (!error && ahead_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += atol(ahead_s);
    return error;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec time;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &time);
    *now = (struct timeval){time.tv_sec, time.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now)
{
    struct timespec now_time;
    clock_gettime(CLOCK_REALTIME, &now_time);
    if (now)
        *now = now_time.tv_sec;
    return now_time.tv_sec;
}
