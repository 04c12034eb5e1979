// Bytes that grow, and the few ways in which requests are written into them.
#pragma once
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct buffer {
    char *bytes;
    size_t used, room;
};

static inline char *buffer_reserve(struct buffer *b, size_t more) {
    if (b->used + more > b->room) {
        b->room = (b->used + more) * 2;
        b->bytes = realloc(b->bytes, b->room);
        if (b->bytes == NULL) {
            fputs("load: out of memory\n", stderr);
            exit(1);
        }
    }
    return b->bytes + b->used;
}

static inline void put_bytes(struct buffer *b, const void *bytes, size_t size) {
    memcpy(buffer_reserve(b, size), bytes, size);
    b->used += size;
}

// A string constant: its length is known when this is compiled.
#define PUT(b, literal) put_bytes((b), "" literal, sizeof(literal) - 1)

static inline void put_text(struct buffer *b, const char *text) { put_bytes(b, text, strlen(text)); }

static inline void put_decimal(struct buffer *b, uint64_t value) {
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    put_bytes(b, digits + at, sizeof digits - at);
}

static inline void put_hex(struct buffer *b, uint64_t value, int width) {
    char *to = buffer_reserve(b, (size_t)width);
    for (int i = width - 1; i >= 0; i--, value >>= 4) to[i] = "0123456789ABCDEF"[value & 15];
    b->used += (size_t)width;
}

static inline void put_word_at(struct buffer *b, size_t at, uint32_t value) {
    uint32_t big_endian = htonl(value);
    memcpy(b->bytes + at, &big_endian, 4);
}

static inline uint32_t word_at(const char *bytes) {
    uint32_t big_endian;
    memcpy(&big_endian, bytes, 4);
    return ntohl(big_endian);
}
