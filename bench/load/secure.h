// Accounts and TLS. Both need OpenSSL, so they are only in the program that is built with -DSECURE:
// whoever measures neither needs none.
#pragma once
#include "buffer.h"
#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>

static struct {
    const char *access_key, *secret; // NULL: requests are not signed
} account;

#ifdef SECURE
#include <openssl/evp.h>
#include <openssl/params.h>
#include <openssl/ssl.h>
#define CAN_BE_SECURE true
typedef SSL secure_channel;

#define FIELDS_MAX 32

struct field {
    const char *name, *value; // each up to the next quote
};

static bool is_before(const char *a, const char *b) {
    while (*a == *b && *a != '"') a++, b++;
    return *b != '"' && (*a == '"' || *a < *b);
}

// The key is set once: the generator shares the cores with the server that it measures.
static EVP_MAC_CTX *keyed_mac(void) {
    static EVP_MAC_CTX *mac;
    if (mac != NULL) {
        EVP_MAC_init(mac, NULL, 0, NULL);
        return mac;
    }
    OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string("digest", "SHA1", 0), OSSL_PARAM_construct_end()};
    mac = EVP_MAC_CTX_new(EVP_MAC_fetch(NULL, "HMAC", NULL));
    if (mac == NULL || !EVP_MAC_init(mac, (unsigned char *)account.secret, strlen(account.secret), params)) {
        fputs("load: OpenSSL has no HMAC-SHA1\n", stderr);
        exit(1);
    }
    return mac;
}

// Add the access key, and the signature of RocketMQ: HMAC-SHA1 over the values of all fields,
// sorted by their names, and the body. The only escapes that we write are the separators of
// properties, \u0001 and \u0002.
static void put_signature(struct buffer *b, size_t header, const struct buffer *body) {
    static struct buffer content;
    struct field fields[FIELDS_MAX];
    int count = 0;
    PUT(b, ",\"AccessKey\":\"");
    put_text(b, account.access_key);
    PUT(b, "\"");
    const char *end = b->bytes + b->used, *at = memmem(b->bytes + header, b->used - header, ":{", 2);
    for (at += 2; at < end; count++) {
        fields[count].name = at + 1;
        fields[count].value = strchr(at + 1, '"') + 3;
        at = strchr(fields[count].value, '"') + 2; // behind the comma
    }
    for (int i = 1; i < count; i++) { // nearly sorted: faster than qsort
        struct field field = fields[i];
        int to = i;
        for (; to > 0 && is_before(field.name, fields[to - 1].name); to--) fields[to] = fields[to - 1];
        fields[to] = field;
    }
    content.used = 0;
    for (int i = 0; i < count; i++) {
        const char *value = fields[i].value, *stop;
        while (*(stop = value + strcspn(value, "\\\"")) == '\\') {
            put_bytes(&content, value, (size_t)(stop - value));
            put_bytes(&content, &(char){(char)(stop[5] - '0')}, 1);
            value = stop + 6;
        }
        put_bytes(&content, value, (size_t)(stop - value));
    }
    unsigned char digest[EVP_MAX_MD_SIZE], text[2 * EVP_MAX_MD_SIZE];
    size_t digest_bytes = 0;
    EVP_MAC_CTX *mac = keyed_mac();
    EVP_MAC_update(mac, (unsigned char *)content.bytes, content.used);
    if (body != NULL) EVP_MAC_update(mac, (unsigned char *)body->bytes, body->used);
    EVP_MAC_final(mac, digest, &digest_bytes, sizeof digest);
    PUT(b, ",\"Signature\":\"");
    put_bytes(b, text, (size_t)EVP_EncodeBlock(text, digest, (int)digest_bytes));
    PUT(b, "\"");
}

// Begin TLS on a socket that is still blocking. The certificate is not verified: the peer is ours.
static secure_channel *begin_tls(int fd) {
    static SSL_CTX *context;
    if (context == NULL) {
        context = SSL_CTX_new(TLS_client_method());
        SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    }
    SSL *tls = SSL_new(context);
    SSL_set_fd(tls, fd);
    if (SSL_connect(tls) != 1) {
        fputs("load: the TLS handshake failed\n", stderr);
        exit(1);
    }
    return tls;
}

// As send() and recv(): how many bytes, 0 at the end, or -1 with errno.
static ssize_t tls_result(SSL *tls, int result) {
    if (result > 0) return result;
    int error = SSL_get_error(tls, result);
    if (error == SSL_ERROR_ZERO_RETURN) return 0;
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) errno = EAGAIN;
    else if (error != SSL_ERROR_SYSCALL) errno = EPROTO;
    return -1;
}

static ssize_t channel_send(secure_channel *tls, int fd, const char *bytes, size_t size) {
    if (tls == NULL) return send(fd, bytes, size, MSG_NOSIGNAL);
    return tls_result(tls, SSL_write(tls, bytes, (int)size));
}

static ssize_t channel_recv(secure_channel *tls, int fd, char *bytes, size_t size) {
    if (tls == NULL) return recv(fd, bytes, size, 0);
    return tls_result(tls, SSL_read(tls, bytes, (int)size));
}

// Whether bytes wait inside of OpenSSL, of which the socket says nothing.
static bool has_pending(secure_channel *tls) { return tls != NULL && SSL_has_pending(tls); }
#else
#define CAN_BE_SECURE false
typedef void secure_channel;

static void put_signature(struct buffer *b, size_t header, const struct buffer *body) {
    (void)b, (void)header, (void)body;
}

static secure_channel *begin_tls(int fd) {
    (void)fd;
    return NULL;
}

static ssize_t channel_send(secure_channel *tls, int fd, const char *bytes, size_t size) {
    (void)tls;
    return send(fd, bytes, size, MSG_NOSIGNAL);
}

static ssize_t channel_recv(secure_channel *tls, int fd, char *bytes, size_t size) {
    (void)tls;
    return recv(fd, bytes, size, 0);
}

static bool has_pending(secure_channel *tls) {
    (void)tls;
    return false;
}
#endif
