/* The doors of the library, and the work on a batch before it reaches a tier: keys, page numbers, addresses. */
#define _GNU_SOURCE
#include <errno.h>

#include "core.h"

struct functions of_others;

/* Which sources this library was built of: Python compares it with those that it has. */
PUBLIC const uint64_t hicache_version = HICACHE_VERSION;

/* Take the functions of others. `digests` receives the checksum of `sample` twice, as headers hold it: at once, and in
 * two pieces. Returns 0, -ENOMEM without memory for the second. */
PUBLIC int64_t hicache_bind(const struct functions *functions, const char *sample, size_t length, uint64_t digests[4])
{
    of_others = *functions;
    void *state = of_others.new_state();
    if (state == NULL)
        return -ENOMEM;
    of_others.reset(state);
    of_others.update(state, sample, length / 3);
    of_others.update(state, sample + length / 3, length - length / 3);
    checksum found[2] = {of_others.hash(sample, length), of_others.digest(state)};
    of_others.free_state(state);
    for (int way = 0; way < 2; way++) {
        digests[2 * way] = __builtin_bswap64(found[way].high);
        digests[2 * way + 1] = __builtin_bswap64(found[way].low);
    }
    return 0;
}

/* -- keys ---------------------------------------------------------------------------------------------------------- */

#define EACH UINT64_C(0x0101010101010101)

/* Eight characters below 128 as a word: the four bytes that they spell in hexadecimal. A bit of *wrong is set unless
 * each is a lower-case hexadecimal digit. */
static inline uint64_t decode(uint64_t digits, uint64_t *wrong)
{
    uint64_t letters = digits >> 6 & EACH;
    uint64_t values = (digits & 0x0F * EACH) + 9 * letters;
    /* Letters must be 10 to 15 and the others at most 9. */
    *wrong |= (values & 0x10 * EACH) | (((values + 6 * EACH) >> 4 & EACH) ^ letters);
    *wrong |= (values + 0x30 * EACH + 0x27 * letters) ^ digits;
    uint64_t pairs = (values << 4 | values >> 8) & UINT64_C(0x00FF00FF00FF00FF);
    pairs = (pairs | pairs >> 8) & UINT64_C(0x0000FFFF0000FFFF);
    return (pairs | pairs >> 16) & 0xFFFFFFFF;
}

struct decode_hashes {
    const uint64_t *text; /* A page hash each, 64 lower-case hexadecimal digits; eight blanks between two. */
    int64_t text_words;
    const uint64_t *identity;
    uint64_t *keys; /* Receives identity and page hash of each. */
    int64_t key_count;
};

/* Returns 0 when the text is malformed, else 1. */
PUBLIC int64_t hicache_decode_hashes(const struct decode_hashes *call)
{
    enum { TEXT_WORDS = 2 * HASH_WORDS + 1 };
    if (call->text_words + 1 != call->key_count * TEXT_WORDS)
        return 0;
    uint64_t wrong = 0;
    for (int64_t page = 0; page < call->key_count; page++) {
        const uint64_t *text = call->text + page * TEXT_WORDS;
        uint64_t *key = call->keys + page * KEY_WORDS;
        memcpy(key, call->identity, 8 * IDENTITY_WORDS);
        for (int word = 0; word < HASH_WORDS; word++) {
            uint64_t low = decode(text[2 * word], &wrong);
            key[IDENTITY_WORDS + word] = low | decode(text[2 * word + 1], &wrong) << 32;
        }
        if (page + 1 < call->key_count)
            wrong |= text[2 * HASH_WORDS] ^ 0x20 * EACH;
    }
    return wrong == 0;
}

struct number_pages {
    const int64_t *indices; /* page_size token indices for each page. */
    int64_t page_size;
    int64_t page_count; /* In the pool. */
    int64_t *numbers;   /* Receives the page in which each group begins. */
    int64_t number_count;
};

/* Returns how many groups are exactly the tokens of their page, in order. */
WIDE PUBLIC int64_t hicache_number_pages(const struct number_pages *call)
{
    int64_t sound = 0;
    for (int64_t page = 0; page < call->number_count; page++) {
        const int64_t *indices = call->indices + page * call->page_size;
        /* Python's division: a negative index is in no page. */
        int64_t number = indices[0] >= 0 ? indices[0] / call->page_size : -1;
        int64_t differing = 0;
        for (int64_t token = 0; token < call->page_size; token++)
            differing |= indices[token] ^ (int64_t)((uint64_t)number * (uint64_t)call->page_size + (uint64_t)token);
        call->numbers[page] = number;
        sound += differing == 0 && number >= 0 && number < call->page_count;
    }
    return sound;
}
