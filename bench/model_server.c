/* model_server.c - a model server that is as fast as one thread per connection can be, to measure what stands before it.
 *
 * Build:  gcc -O2 -Wall -Wextra -pthread -o model_server model_server.c
 * Use:    model_server PORT NAME LOAD_MS
 *
 * It listens at once; /health is 503 until LOAD_MS have passed, then 200. Any POST is answered with a small JSON body,
 * or, if the body has "stream":true, with Server-Sent Events of about 150 bytes, one write each. The body steers it:
 *     "chunks":200         events of a stream                     (default 200)
 *     "interval_us":20000  time between events                    (default 0)
 *     "answer_us":150000   time before the answer                 (default 0)
 * Each event carries "t", CLOCK_MONOTONIC in nanoseconds when it was written: a reader on this machine knows its delay.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LIMIT 65536

static const char *name;
static long long ready_at;

static long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void sleep_until(long long at)
{
    struct timespec t = {at / 1000000000LL, at % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

static long number(const char *body, const char *key, long otherwise)
{
    const char *p = strstr(body, key);
    if (!p) return otherwise;
    p += strlen(key);
    while (*p == ' ' || *p == ':') p++;
    return strtol(p, NULL, 10);
}

static int has_true(const char *body, const char *key)
{
    const char *p = strstr(body, key);
    if (!p) return 0;
    p += strlen(key);
    while (*p == ' ' || *p == ':') p++;
    return strncmp(p, "true", 4) == 0;
}

static int put(int fd, const char *data, size_t size)
{
    while (size) {
        ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
        if (n <= 0) return -1;
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

static int answer(int fd, int status, const char *body)
{
    char out[1024];
    int n = snprintf(out, sizeof out,
                     "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", status,
                     status == 200 ? "OK" : "Service Unavailable", strlen(body), body);
    return put(fd, out, (size_t)n);
}

static int stream(int fd, const char *body)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
    long chunks = number(body, "\"chunks\"", 200), pause = number(body, "\"interval_us\"", 0);
    char data[256], out[300];
    long long next = now_ns();
    if (put(fd, head, sizeof head - 1)) return -1;
    for (long i = 0; i < chunks; i++) {
        if (pause && i) sleep_until(next += pause * 1000LL);
        int n = snprintf(data, sizeof data,
                         "data: {\"id\":\"bench\",\"object\":\"chat.completion.chunk\",\"model\":\"%s\",\"t\":%lld,"
                         "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n",
                         name, now_ns());
        int m = snprintf(out, sizeof out, "%x\r\n%s\r\n", n, data);
        if (put(fd, out, (size_t)m)) return -1;
    }
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    return put(fd, end, sizeof end - 1);
}

static int serve_one(int fd, char *buffer, size_t *have)
{
    char *end;
    while (buffer[*have] = 0, !(end = strstr(buffer, "\r\n\r\n"))) {
        if (*have >= LIMIT - 1) return -1;
        ssize_t n = recv(fd, buffer + *have, LIMIT - 1 - *have, 0);
        if (n <= 0) return -1;
        *have += (size_t)n;
    }
    size_t head = (size_t)(end - buffer) + 4;
    char *p = strcasestr(buffer, "\r\ncontent-length:");
    size_t length = p && p < end ? (size_t)strtol(p + 17, NULL, 10) : 0;
    int last = (p = strcasestr(buffer, "\r\nconnection: close")) != NULL && p < end;
    if (head + length >= LIMIT) return -1;
    while (*have < head + length) {
        ssize_t n = recv(fd, buffer + *have, LIMIT - 1 - *have, 0);
        if (n <= 0) return -1;
        *have += (size_t)n;
        buffer[*have] = 0;
    }
    char after = buffer[head + length];
    buffer[head + length] = 0;
    const char *body = buffer + head;
    char text[256];
    int rc;
    if (now_ns() < ready_at) {
        rc = answer(fd, 503, "{\"error\":{\"message\":\"Loading model\",\"type\":\"unavailable_error\",\"code\":503}}");
    } else if (buffer[0] == 'G') {
        rc = answer(fd, 200, "{\"status\":\"ok\"}");
    } else {
        long wait = number(body, "\"answer_us\"", 0);
        if (wait) sleep_until(now_ns() + wait * 1000LL);
        snprintf(text, sizeof text, "{\"model\":\"%s\",\"choices\":[{\"message\":{\"content\":\"hi\"}}]}", name);
        rc = has_true(body, "\"stream\"") ? stream(fd, body) : answer(fd, 200, text);
    }
    buffer[head + length] = after;
    *have -= head + length;
    memmove(buffer, buffer + head + length, *have);
    return last ? -1 : rc;
}

static void *serve(void *argument)
{
    int fd = (int)(long)argument, on = 1;
    char *buffer = malloc(LIMIT);
    size_t have = 0;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    while (buffer && serve_one(fd, buffer, &have) == 0) {
    }
    free(buffer);
    close(fd);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: model_server PORT NAME LOAD_MS\n");
        return 2;
    }
    ready_at = now_ns() + atol(argv[3]) * 1000000LL;
    name = argv[2];
    signal(SIGPIPE, SIG_IGN);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) {
        perror("model_server: bind");
        return 1;
    }
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&small, 128 * 1024);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        pthread_t thread;
        if (fd >= 0 && pthread_create(&thread, &small, serve, (void *)(long)fd)) close(fd);
    }
}
