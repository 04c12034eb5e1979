// Gives back every byte it gets: what sockets on this machine can do at most.
//
//     echo        prints the port of 127.0.0.1 on which it listens
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static char bytes[256 * 1024];

static int fail(const char *what) {
    perror(what);
    return 1;
}

static void watch(int poll, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
}

static void give_back(int fd) {
    ssize_t got = recv(fd, bytes, sizeof bytes, 0);
    // The sockets block: the generator reads all the time, so this never waits for long.
    for (ssize_t sent = 0; sent < got;) {
        ssize_t now = send(fd, bytes + sent, (size_t)(got - sent), MSG_NOSIGNAL);
        if (now <= 0) {
            got = 0;
            break;
        }
        sent += now;
    }
    if (got <= 0) close(fd);
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0), yes = 1;
    if (bind(listener, (struct sockaddr *)&address, size) != 0) return fail("bind");
    if (listen(listener, 1024) != 0) return fail("listen");
    if (getsockname(listener, (struct sockaddr *)&address, &size) != 0) return fail("getsockname");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    watch(poll, listener);
    for (;;) {
        struct epoll_event ready[256];
        int count = epoll_wait(poll, ready, 256, -1);
        for (int i = 0; i < count; i++) {
            if (ready[i].data.fd != listener) {
                give_back(ready[i].data.fd);
                continue;
            }
            int fd = accept(listener, NULL, NULL);
            if (fd < 0) continue;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
            watch(poll, fd);
        }
    }
}
