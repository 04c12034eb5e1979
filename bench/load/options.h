// What the command line asks for; load.c says what each option means.
#pragma once
#include "requests.h"
#include <getopt.h>
#include <stdbool.h>

#define PORTS_MAX 64

enum mode { ECHO, SEND, PULL, TX };

static struct {
    enum mode mode;
    const char *mode_name, *server;
    int ports[PORTS_MAX], port_count, connections, depth;
    double seconds, warm_up_s;
    bool acknowledged, tls;
    struct target target;
} options = {.connections = 1, .depth = 1, .seconds = 5, .warm_up_s = 1, .server = "",
             .target = {.topic = "bench", .topics = 0, .queues = 4}};

static struct buffer body; // of every message

_Noreturn static void usage(const char *what) {
    fprintf(stderr, "load: %s; usage: load echo|send|pull|tx --port N[,N] [options], see load.c\n", what);
    exit(2);
}

static enum mode mode_named(const char *name) {
    const char *names[] = {[ECHO] = "echo", [SEND] = "send", [PULL] = "pull", [TX] = "tx"};
    for (int mode = ECHO; mode <= TX; mode++)
        if (strcmp(name, names[mode]) == 0) return (enum mode)mode;
    usage("no such mode");
}

static void read_ports(const char *words) {
    for (char *rest; *words != '\0'; words = *rest == ',' ? rest + 1 : rest) {
        unsigned long port = strtoul(words, &rest, 10);
        if (rest == words || port < 1 || port > 65535) usage("a port is a number up to 65535");
        if (options.port_count == PORTS_MAX) usage("too many ports");
        options.ports[options.port_count++] = (int)port;
    }
}

static void read_account(char *words) {
    char *secret = strchr(words, ',');
    if (secret == NULL) usage("an account is an access key, a comma and a secret key");
    *secret++ = '\0';
    account.access_key = words;
    account.secret = secret;
}

static void read_arguments(int count, char **words) {
    static const struct option known[] = {
        {"port", 1, NULL, 'p'},    {"connections", 1, NULL, 'c'}, {"depth", 1, NULL, 'd'},
        {"body", 1, NULL, 'b'},    {"seconds", 1, NULL, 's'},     {"warm-up", 1, NULL, 'w'},
        {"topic", 1, NULL, 't'},   {"topics", 1, NULL, 'T'},      {"queues", 1, NULL, 'q'},
        {"server", 1, NULL, 'S'},  {"acknowledged", 0, NULL, 'a'}, {"account", 1, NULL, 'A'},
        {"tls", 0, NULL, 'e'},     {NULL, 0, NULL, 0}};
    size_t body_bytes = 1024;
    for (int option; (option = getopt_long(count, words, "", known, NULL)) != -1;) {
        switch (option) {
        case 'p': read_ports(optarg); break;
        case 'c': options.connections = atoi(optarg); break;
        case 'd': options.depth = atoi(optarg); break;
        case 'b': body_bytes = strtoul(optarg, NULL, 10); break;
        case 's': options.seconds = atof(optarg); break;
        case 'w': options.warm_up_s = atof(optarg); break;
        case 't': options.target.topic = optarg; break;
        case 'T': options.target.topics = atoi(optarg); break;
        case 'q': options.target.queues = atoi(optarg); break;
        case 'S': options.server = optarg; break;
        case 'a': options.acknowledged = true; break;
        case 'A': read_account(optarg); break;
        case 'e': options.tls = true; break;
        default: usage("no such option");
        }
    }
    if (optind != count - 1) usage("one mode is needed");
    if (options.port_count < 1 || options.connections < 1 || options.depth < 1 || options.target.queues < 1)
        usage("port, connections, depth and queues are at least 1");
    if (body_bytes < 1 || options.seconds <= 0) usage("body and seconds are more than 0");
    if (!CAN_BE_SECURE && (options.tls || account.access_key != NULL))
        usage("this program was built without OpenSSL, which accounts and TLS need");
    options.mode_name = words[optind];
    options.mode = mode_named(options.mode_name);
    for (size_t i = 0; i < body_bytes; i++) put_bytes(&body, &"abcdefghijklmnopqrstuvwxyz"[i * 7 % 26], 1);
}
