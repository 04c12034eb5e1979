// Clocks, latencies, processor time.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static inline uint64_t clock_ns(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// One counter per microsecond: exact, and only the pages that are used take memory.
#define LATENCY_MAX_US 10000000u

struct latencies {
    uint32_t *counts;
    uint64_t total, max_ns;
};

static inline void latency_add(struct latencies *l, uint64_t ns) {
    uint64_t us = ns / 1000;
    l->counts[us < LATENCY_MAX_US ? us : LATENCY_MAX_US - 1]++;
    l->total++;
    if (ns > l->max_ns) l->max_ns = ns;
}

static inline double latency_us(const struct latencies *l, double share) {
    uint64_t wanted = (uint64_t)((double)l->total * share), seen = 0;
    for (uint32_t us = 0; us < LATENCY_MAX_US; us++) {
        seen += l->counts[us];
        if (seen > wanted) {
            double middle = us + 0.5, max = (double)l->max_ns / 1000;
            return middle < max ? middle : max;
        }
    }
    return (double)l->max_ns / 1000;
}

// Seconds that these processes (numbers with commas between them) have used, with all their threads.
static inline double processes_cpu_s(const char *pids) {
    double ticks = 0;
    while (*pids != '\0') {
        char path[64], line[1024], *rest;
        snprintf(path, sizeof path, "/proc/%lu/stat", strtoul(pids, &rest, 10));
        FILE *file = fopen(path, "r");
        if (file == NULL || fgets(line, sizeof line, file) == NULL) {
            fprintf(stderr, "load: %s cannot be read\n", path);
            exit(1);
        }
        fclose(file);
        unsigned long long user = 0, system = 0;
        char *after_name = strrchr(line, ')'); // the name may hold anything, blanks too
        if (after_name != NULL)
            sscanf(after_name + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &system);
        ticks += (double)(user + system);
        pids = *rest == ',' ? rest + 1 : "";
    }
    return ticks / (double)sysconf(_SC_CLK_TCK);
}

static inline double own_cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

// Seconds that all processors of the machine were not idle.
static inline double machine_cpu_s(void) {
    unsigned long long v[8] = {0};
    FILE *file = fopen("/proc/stat", "r");
    if (file == NULL) return 0;
    int read = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", v, v + 1, v + 2, v + 3, v + 4, v + 5,
                      v + 6, v + 7);
    fclose(file);
    // All but idle (3) and waiting for a disk (4); what a hypervisor took away (7) counts as use.
    return read < 8 ? 0 : (double)(v[0] + v[1] + v[2] + v[5] + v[6] + v[7]) / (double)sysconf(_SC_CLK_TCK);
}
