// Reading answers. Only a handful of fields is looked at, so there is no JSON parser: the text
// `"name":` cannot occur inside a JSON string, whose own quotes are escaped.
#pragma once
#define _GNU_SOURCE
#include "buffer.h"
#include <stdbool.h>

struct answer {
    const char *header, *body, *end;
    uint32_t code, flag, opaque;
};

_Noreturn static inline void broken(const char *what, const char *text, size_t size) {
    fprintf(stderr, "load: %s: %.*s\n", what, (int)(size > 500 ? 500 : size), text);
    exit(3);
}

static inline const char *find_field(const struct answer *a, const char *name) {
    size_t size = (size_t)(a->body - a->header);
    char *found = memmem(a->header, size, name, strlen(name));
    if (found == NULL) broken("an answer lacks a field", a->header, size);
    found += strlen(name);
    return *found == '"' ? found + 1 : found; // fields of extFields are strings
}

// `name` with its quotes and colon.
static inline uint64_t number_field(const struct answer *a, const char *name) {
    return strtoull(find_field(a, name), NULL, 10); // the `}` of the header ends every number
}

// The log offset is the last 16 of the 32 hex digits of the message's id.
static inline uint64_t log_offset_field(const struct answer *a) {
    const char *id = find_field(a, "\"msgId\":");
    char digits[17] = {0};
    if (a->body - id < 32) broken("a message id is too short", a->header, (size_t)(a->body - a->header));
    memcpy(digits, id + 16, 16);
    return strtoull(digits, NULL, 16);
}

// How many bytes the first answer takes, or 0 if it is not all here yet.
static inline size_t cut_answer(struct answer *a, const char *bytes, size_t size) {
    if (size < 8) return 0;
    size_t whole = 4 + (size_t)word_at(bytes);
    if (size < whole) return 0;
    uint32_t lengths = word_at(bytes + 4);
    size_t header_size = lengths & 0xFFFFFF;
    if (lengths >> 24 != 0 || 8 + header_size > whole) broken("not a frame with a JSON header", bytes, 8);
    a->header = bytes + 8;
    a->body = a->header + header_size;
    a->end = bytes + whole;
    a->code = (uint32_t)number_field(a, "\"code\":");
    a->flag = (uint32_t)number_field(a, "\"flag\":");
    a->opaque = (uint32_t)number_field(a, "\"opaque\":");
    return whole;
}

// The messages in a pull's answer; each must look like one.
static inline uint64_t count_records(const struct answer *a) {
    uint64_t count = 0;
    const char *at = a->body;
    for (; at + 8 <= a->end; count++) {
        uint32_t size = word_at(at), magic = word_at(at + 4);
        bool known = magic == 0xDAA320A7u || magic == 0xDAA320ABu; // records V1 and V2
        if (!known || size < 8) broken("a pull's answer holds no record where one should be", a->header, 200);
        at += size;
    }
    if (at != a->end) broken("a pull's answer ends within a record", a->header, 200);
    return count;
}
