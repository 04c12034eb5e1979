// The load generator: one thread, many connections, so many requests under way on each.
//
//     load MODE --port N[,N] [--connections N] [--depth N] [--body BYTES] [--seconds S] [--warm-up S]
//          [--topic NAME] [--topics COUNT] [--queues N] [--acknowledged] [--server PID,PID]
//          [--account KEY,SECRET] [--tls]
//
//     echo    bytes that come back: the limit of the sockets
//     send    messages, in turn to every queue of every topic
//     pull    32 messages a time; every connection walks one queue, from its start, over and over
//     tx      a half, and when it is answered its commit: one-way, or waited for if --acknowledged
//
// With several ports, connections take turns: each port has as many of them, give or take one.
// With an account, every request is signed.
// With --topics the names are NAME0, NAME1 and so on. --server says whose processor time to take.
// Everything is counted between the end of the warm-up and the end of the measured seconds, at one
// and the same moment; then what is under way is waited for. One line of JSON tells the outcome.
// Only an answer with code 0 is a success; all others are counted by their code.
#define _GNU_SOURCE
#include "answers.h"
#include "measures.h"
#include "options.h"
#include "requests.h"
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define CODES 1024            // answers with a higher code are counted as this
#define PATIENCE_NS 10000000000u // without any answer for so long, we give up

enum phase { WARMING, MEASURING, DRAINING };

// One request that is under way.
struct flight {
    bool waits;  // for an answer
    bool ending; // a transaction whose commit was sent
    uint32_t opaque;
    uint64_t began_ns, key;
    struct place place;
};

struct connection {
    int fd;
    secure_channel *tls; // NULL: without TLS
    bool is_blocked; // the socket takes no more; told when it does
    struct buffer in, out;
    size_t out_sent;
    struct flight *flights; // as many as the depth
    uint32_t turns;         // requests so far
    uint64_t echoes;        // bytes come back in order, so the oldest flight is theirs
    struct place walks;     // pull: the queue, where to go on, where it ends
    uint64_t next_offset, end_offset;
    bool knows_end;
};

struct counts {
    uint64_t answers, messages, bytes_in, bytes_out;
    double server_cpu_s, own_cpu_s, machine_cpu_s;
    uint64_t at_ns;
};

static enum phase phase = WARMING;
static struct counts counts, began, ended;
static struct latencies latencies;
static struct unique_keys keys;
static struct connection *connections;
static uint64_t under_way, sent_messages, now_ms, broker_requests;
static uint64_t errors[CODES + 1], unasked[CODES + 1];
static int poll_fd;

// --- asking --------------------------------------------------------------------------------------

// Any message, or the n-th connection, has its place: topics first, so that all are used evenly.
static struct place place_of(uint64_t number) {
    uint64_t topics = options.target.topics > 0 ? (uint64_t)options.target.topics : 1;
    return (struct place){.topic = (int)(number % topics),
                          .queue = (int)(number / topics % (uint64_t)options.target.queues)};
}

// From an opaque the slot can be told; the slot after the last is that of one-way requests.
static uint32_t next_opaque(struct connection *c, int slot) {
    uint32_t slots = (uint32_t)options.depth + 1;
    return (c->turns++ % (0x7FFFFFFFu / slots)) * slots + (uint32_t)slot;
}

static void ask_pull(struct connection *c, struct flight *f) {
    f->place = c->walks;
    put_pull(&c->out, &options.target, f->place, c->next_offset, f->opaque);
    c->next_offset += PULL_MESSAGES;
    if (c->next_offset >= c->end_offset) c->next_offset = 0;
}

static void ask(struct connection *c, int slot, uint64_t now_ns) {
    struct flight *f = &c->flights[slot];
    f->waits = true;
    f->ending = false;
    f->began_ns = now_ns;
    f->opaque = next_opaque(c, slot);
    under_way++;
    if (options.mode == ECHO) {
        put_bytes(&c->out, body.bytes, body.used);
    } else if (options.mode == PULL) {
        ask_pull(c, f);
    } else {
        f->place = place_of(sent_messages++);
        f->key = keys.next++;
        put_send(&c->out, &options.target, f->place, &keys, f->key, now_ms, &body, options.mode == TX, f->opaque);
    }
}

static void ask_commit(struct connection *c, int slot, const struct answer *a) {
    struct flight *f = &c->flights[slot];
    uint32_t opaque = next_opaque(c, options.acknowledged ? slot : options.depth);
    put_commit(&c->out, &options.target, f->place, &keys, f->key, number_field(a, "\"queueOffset\":"),
               log_offset_field(a), !options.acknowledged, opaque);
    f->opaque = opaque;
    f->ending = true;
}

static void watch_for(struct connection *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(poll_fd, operation, c->fd, &event);
}

static void write_out(struct connection *c) {
    while (c->out_sent < c->out.used) {
        ssize_t wrote = channel_send(c->tls, c->fd, c->out.bytes + c->out_sent, c->out.used - c->out_sent);
        if (wrote < 0 && errno == EAGAIN) {
            if (!c->is_blocked) watch_for(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            c->is_blocked = true;
            return;
        }
        if (wrote < 0) broken("the connection failed while sending", strerror(errno), 100);
        c->out_sent += (size_t)wrote;
        counts.bytes_out += (uint64_t)wrote;
    }
    c->out.used = c->out_sent = 0;
    if (c->is_blocked) watch_for(c, EPOLL_CTL_MOD, EPOLLIN);
    c->is_blocked = false;
}

// --- answers -------------------------------------------------------------------------------------

static void finish(struct connection *c, int slot, uint64_t messages, bool is_success, uint64_t now_ns) {
    struct flight *f = &c->flights[slot];
    f->waits = false;
    under_way--;
    if (is_success) {
        counts.answers++;
        counts.messages += messages;
        if (phase == MEASURING) latency_add(&latencies, now_ns - f->began_ns);
    }
    if (phase != DRAINING) ask(c, slot, now_ns);
}

static void take_pulled(struct connection *c, int slot, const struct answer *a, uint64_t now_ns) {
    c->end_offset = number_field(a, "\"maxOffset\":");
    bool is_first = !c->knows_end;
    c->knows_end = true;
    finish(c, slot, count_records(a), true, now_ns);
    // Only now is it known how far the queue goes, so the other requests of this connection start.
    for (int other = 1; is_first && phase != DRAINING && other < options.depth; other++) ask(c, other, now_ns);
}

static void take_answer(struct connection *c, const struct answer *a, uint64_t now_ns) {
    if ((a->flag & 1) == 0) { // the broker asks us something; a load generator has nothing to say
        broker_requests++;
        return;
    }
    int slot = (int)(a->opaque % ((uint32_t)options.depth + 1));
    struct flight *f = &c->flights[slot];
    uint32_t code = a->code < CODES ? a->code : CODES;
    if (slot == options.depth || !f->waits || f->opaque != a->opaque) {
        unasked[code]++; // an answer to a one-way request: brokers do that when they throw it away
        return;
    }
    if (code != 0) {
        errors[code]++;
        finish(c, slot, 0, false, now_ns);
    } else if (options.mode == PULL) {
        take_pulled(c, slot, a, now_ns);
    } else if (options.mode == TX && !f->ending) {
        ask_commit(c, slot, a);
        if (!options.acknowledged) finish(c, slot, 1, true, now_ns);
    } else {
        finish(c, slot, 1, true, now_ns);
    }
}

static size_t take_echo(struct connection *c, size_t size, uint64_t now_ns) {
    if (size < body.used) return 0;
    finish(c, (int)(c->echoes++ % (uint64_t)options.depth), 1, true, now_ns);
    return body.used;
}

// Read what has arrived, and ask again for what was answered. Return whether something was read.
static bool read_in(struct connection *c) {
    char *free_bytes = buffer_reserve(&c->in, 64 * 1024);
    ssize_t got = channel_recv(c->tls, c->fd, free_bytes, c->in.room - c->in.used);
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) broken("the server closed a connection", got < 0 ? strerror(errno) : "", 100);
    c->in.used += (size_t)got;
    counts.bytes_in += (uint64_t)got;
    uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    size_t at = 0, took;
    do {
        struct answer a;
        if (options.mode == ECHO) {
            took = take_echo(c, c->in.used - at, now_ns);
        } else {
            took = cut_answer(&a, c->in.bytes + at, c->in.used - at);
            if (took > 0) take_answer(c, &a, now_ns);
        }
        at += took;
    } while (took > 0);
    memmove(c->in.bytes, c->in.bytes + at, c->in.used - at);
    c->in.used -= at;
    if (!c->is_blocked) write_out(c);
    return true;
}

// --- the run -------------------------------------------------------------------------------------

static void connect_to(struct connection *c, int port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        fprintf(stderr, "load: cannot connect to 127.0.0.1:%d: %s\n", port, strerror(errno));
        exit(1);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (options.tls) c->tls = begin_tls(fd);
    int flags = 1;
    if (ioctl(fd, FIONBIO, &flags) != 0) broken("ioctl", strerror(errno), 100);
    c->fd = fd;
}

static void open_connections(void) {
    connections = calloc((size_t)options.connections, sizeof *connections);
    poll_fd = epoll_create1(0);
    for (int i = 0; i < options.connections; i++) {
        struct connection *c = &connections[i];
        connect_to(c, options.ports[i % options.port_count]);
        c->flights = calloc((size_t)options.depth + 1, sizeof *c->flights);
        c->walks = place_of((uint64_t)i);
        watch_for(c, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void begin_asking(void) {
    now_ms = clock_ns(CLOCK_REALTIME) / 1000000;
    keys.process = (uint32_t)getpid() & 0xFFFF;
    keys.next = (now_ms & 0xFFFFFFFF) << 16;
    for (int i = 0; i < options.connections; i++) {
        int at_once = options.mode == PULL ? 1 : options.depth;
        for (int slot = 0; slot < at_once; slot++) ask(&connections[i], slot, clock_ns(CLOCK_MONOTONIC));
        write_out(&connections[i]);
    }
}

static struct counts counts_now(void) {
    struct counts snapshot = counts;
    snapshot.server_cpu_s = processes_cpu_s(options.server);
    snapshot.own_cpu_s = own_cpu_s();
    snapshot.machine_cpu_s = machine_cpu_s();
    snapshot.at_ns = clock_ns(CLOCK_MONOTONIC);
    return snapshot;
}

// One-way commits may still be in our buffers, or unread in the server's: it has read them all when
// it closes its side after we closed ours.
static void say_goodbye(struct connection *c) {
    int blocking = 0;
    struct timeval patience = {.tv_sec = 2};
    ioctl(c->fd, FIONBIO, &blocking);
    write_out(c);
    shutdown(c->fd, SHUT_WR);
    setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    c->in.used = 0;
    while (channel_recv(c->tls, c->fd, buffer_reserve(&c->in, 4096), 4096) > 0) continue;
    close(c->fd);
}

static void run(void) {
    uint64_t start_ns = clock_ns(CLOCK_MONOTONIC), answered_ns = start_ns;
    uint64_t measure_ns = start_ns + (uint64_t)(options.warm_up_s * 1e9);
    uint64_t drain_ns = measure_ns + (uint64_t)(options.seconds * 1e9);
    begin_asking();
    while (phase != DRAINING || under_way > 0) {
        struct epoll_event ready[256];
        int count = epoll_wait(poll_fd, ready, 256, 20);
        now_ms = clock_ns(CLOCK_REALTIME) / 1000000;
        for (int i = 0; i < count; i++) {
            struct connection *c = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT) write_out(c);
            if (ready[i].events & ~(uint32_t)EPOLLOUT) {
                while (read_in(c) && has_pending(c->tls)) continue;
            }
        }
        uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        if (count > 0) answered_ns = now_ns;
        if (phase == WARMING && now_ns >= measure_ns) {
            phase = MEASURING;
            began = counts_now();
        } else if (phase == MEASURING && now_ns >= drain_ns) {
            phase = DRAINING;
            ended = counts_now();
        }
        if (now_ns - answered_ns > PATIENCE_NS) {
            if (phase == DRAINING) return; // the outcome says how many were left without an answer
            broken("no answer for ten seconds", options.mode_name, 100);
        }
    }
    for (int i = 0; i < options.connections; i++) say_goodbye(&connections[i]);
}

static void print_codes(const char *name, const uint64_t *by_code) {
    printf(", \"%s\": {", name);
    const char *between = "";
    for (int code = 0; code <= CODES; code++) {
        if (by_code[code] == 0) continue;
        printf("%s\"%d\": %llu", between, code, (unsigned long long)by_code[code]);
        between = ", ";
    }
    printf("}");
}

static void print_outcome(void) {
    double seconds = (double)(ended.at_ns - began.at_ns) / 1e9;
    double messages = (double)(ended.messages - began.messages), answers = (double)(ended.answers - began.answers);
    printf("{\"mode\": \"%s\", \"connections\": %d, \"depth\": %d, \"seconds\": %.4f", options.mode_name,
           options.connections, options.depth, seconds);
    printf(", \"messages\": %.0f, \"answers\": %.0f, \"rate\": %.1f, \"answer_rate\": %.1f", messages, answers,
           messages / seconds, answers / seconds);
    printf(", \"p50_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, \"max_us\": %.1f", latency_us(&latencies, 0.5),
           latency_us(&latencies, 0.99), latency_us(&latencies, 0.999), (double)latencies.max_ns / 1000);
    printf(", \"bytes_in\": %llu, \"bytes_out\": %llu", (unsigned long long)(ended.bytes_in - began.bytes_in),
           (unsigned long long)(ended.bytes_out - began.bytes_out));
    printf(", \"server_cpu_s\": %.3f, \"generator_cpu_s\": %.3f, \"machine_cpu_s\": %.3f",
           ended.server_cpu_s - began.server_cpu_s, ended.own_cpu_s - began.own_cpu_s,
           ended.machine_cpu_s - began.machine_cpu_s);
    // From here on: the whole run, with its warm-up and what was under way at its end.
    printf(", \"messages_in_all\": %llu, \"unanswered\": %llu, \"broker_requests\": %llu",
           (unsigned long long)counts.messages, (unsigned long long)under_way, (unsigned long long)broker_requests);
    print_codes("errors", errors);
    print_codes("unasked", unasked);
    printf("}\n");
}

int main(int count, char **words) {
    read_arguments(count, words);
    signal(SIGPIPE, SIG_IGN); // OpenSSL writes without MSG_NOSIGNAL
    latencies.counts = calloc(LATENCY_MAX_US, sizeof *latencies.counts);
    open_connections();
    run();
    print_outcome();
    return 0;
}
