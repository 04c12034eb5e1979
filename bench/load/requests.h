// The requests, as a Java client of RocketMQ 4.9.7 writes them:
//
//     | length 4 | header length 4 | JSON header | body |
//
// They are written piece by piece instead of being patched into a template: fields may then have
// any width, and it still costs well under a microsecond.
#pragma once
#include "secure.h"

#define GROUP "bench-group"
#define PULL_MESSAGES 32

struct target {
    const char *topic; // the name itself, or what comes before its number
    int topics;        // 0: one topic without a number
    int queues;
};

// Where one message goes.
struct place {
    int topic, queue;
};

// What tells one message from all others, also from those of an earlier run against the same broker.
struct unique_keys {
    uint32_t process;
    uint64_t next;
};

static inline size_t begin_frame(struct buffer *b) {
    size_t start = b->used;
    buffer_reserve(b, 8);
    b->used += 8;
    return start;
}

// The fields begin behind `{"code":N,"extFields":{` and are complete but for account and signature.
static inline void end_header(struct buffer *b, size_t start, const struct buffer *body, uint32_t opaque,
                              int one_way) {
    if (account.access_key != NULL) put_signature(b, start + 8, body);
    PUT(b, "},\"flag\":");
    put_decimal(b, one_way ? 2 : 0);
    PUT(b, ",\"language\":\"JAVA\",\"opaque\":");
    put_decimal(b, opaque);
    PUT(b, ",\"serializeTypeCurrentRPC\":\"JSON\",\"version\":407}");
}

static inline void end_frame(struct buffer *b, size_t start, size_t header_end) {
    put_word_at(b, start, (uint32_t)(b->used - start - 4));
    put_word_at(b, start + 4, (uint32_t)(header_end - start - 8));
}

static inline void put_topic(struct buffer *b, const struct target *target, struct place place) {
    put_text(b, target->topic);
    if (target->topics > 0) put_decimal(b, (uint64_t)place.topic);
}

static inline void put_key(struct buffer *b, const struct unique_keys *keys, uint64_t key) {
    PUT(b, "7F000001");
    put_hex(b, keys->process, 4);
    PUT(b, "18B4AAC2");
    put_hex(b, key, 12);
}

// SEND_MESSAGE_V2; a half if it opens a transaction.
static inline void put_send(struct buffer *b, const struct target *target, struct place place,
                            const struct unique_keys *keys, uint64_t key, uint64_t now_ms,
                            const struct buffer *body, int half, uint32_t opaque) {
    size_t start = begin_frame(b);
    PUT(b, "{\"code\":310,\"extFields\":{\"a\":\"" GROUP "\",\"b\":\"");
    put_topic(b, target, place);
    PUT(b, "\",\"c\":\"TBW102\",\"d\":\"4\",\"e\":\"");
    put_decimal(b, (uint64_t)place.queue);
    PUT(b, "\",\"f\":\"");
    put_decimal(b, half ? 4 : 0); // sysFlag: prepared
    PUT(b, "\",\"g\":\"");
    put_decimal(b, now_ms);
    PUT(b, "\",\"h\":\"0\",\"i\":\"");
    if (half) PUT(b, "TRAN_MSG\\u0001true\\u0002PGROUP\\u0001" GROUP "\\u0002");
    PUT(b, "UNIQ_KEY\\u0001");
    put_key(b, keys, key);
    PUT(b, "\\u0002WAIT\\u0001true\\u0002TAGS\\u0001TagA\",\"j\":\"0\",\"k\":\"false\",\"m\":\"false\"");
    end_header(b, start, body, opaque, 0);
    size_t header_end = b->used;
    put_bytes(b, body->bytes, body->used);
    end_frame(b, start, header_end);
}

// END_TRANSACTION that commits the half which lies at these offsets.
static inline void put_commit(struct buffer *b, const struct target *target, struct place place,
                              const struct unique_keys *keys, uint64_t key, uint64_t queue_offset,
                              uint64_t log_offset, int one_way, uint32_t opaque) {
    size_t start = begin_frame(b);
    PUT(b, "{\"code\":37,\"extFields\":{\"topic\":\"");
    put_topic(b, target, place);
    PUT(b, "\",\"producerGroup\":\"" GROUP "\",\"tranStateTableOffset\":\"");
    put_decimal(b, queue_offset);
    PUT(b, "\",\"commitLogOffset\":\"");
    put_decimal(b, log_offset);
    PUT(b, "\",\"commitOrRollback\":\"8\",\"fromTransactionCheck\":\"false\",\"msgId\":\"");
    put_key(b, keys, key);
    PUT(b, "\",\"transactionId\":\"");
    put_key(b, keys, key);
    PUT(b, "\"");
    end_header(b, start, NULL, opaque, one_way);
    end_frame(b, start, b->used);
}

// PULL_MESSAGE that does not wait: if there is nothing, the answer says so and is counted.
static inline void put_pull(struct buffer *b, const struct target *target, struct place place,
                            uint64_t queue_offset, uint32_t opaque) {
    size_t start = begin_frame(b);
    PUT(b, "{\"code\":11,\"extFields\":{\"consumerGroup\":\"" GROUP "\",\"topic\":\"");
    put_topic(b, target, place);
    PUT(b, "\",\"queueId\":\"");
    put_decimal(b, (uint64_t)place.queue);
    PUT(b, "\",\"queueOffset\":\"");
    put_decimal(b, queue_offset);
    PUT(b, "\",\"maxMsgNums\":\"");
    put_decimal(b, PULL_MESSAGES);
    PUT(b, "\",\"sysFlag\":\"4\",\"commitOffset\":\"0\",\"suspendTimeoutMillis\":\"0\",\"subscription\":\"*\","
           "\"subVersion\":\"0\",\"expressionType\":\"TAG\"");
    end_header(b, start, NULL, opaque, 0);
    end_frame(b, start, b->used);
}
