/* The native core of hicache_ext: the work done once per page, without Python and without the GIL.
 *
 * Python calls each function with the address of one struct of words (int64_t, or addresses in their place), which has
 * the function's name; native/__init__.py says how. ``Struct`` in Python has the same fields in the same order, and a
 * test asks the compiler. No function keeps an address after it has returned, allocates what it does not free, or
 * raises anything: it returns a count or a status as its comment says, errors of the system as -errno.
 *
 * Memory that other processes map (the index), slabs and servers may hold any bytes. A word from there that becomes a
 * position or a length is read once and used only where it lies in its part; lengths in a struct are the caller's own.
 *
 * What is little-endian on disk and in headers is copied as it is: big-endian machines are refused at compile time.
 */
#ifndef HICACHE_CORE_H
#define HICACHE_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define PUBLIC __attribute__((visibility("default")))

/* A function that is compiled for wider vectors, too; the variant is chosen when the library is loaded. Not every
 * compiler can: the build defines WIDE as nothing where this one fails (setup.py). */
#ifndef WIDE
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WIDE __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define WIDE
#endif
#endif

#if !defined(__linux__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || !defined(__LP64__)
#error "64-bit little-endian Linux only"
#endif

/* -- external functions ------------------------------------------------------------------------------------------- */

typedef struct { uint64_t low, high; } checksum; /* XXH128_hash_t */

/* XXH3 of the xxhash package's extension module, and the two system calls that tests want to see fail. */
struct functions {
    checksum (*hash)(const void *, size_t);
    void *(*new_state)(void);
    int (*free_state)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    checksum (*digest)(const void *);
    ssize_t (*read)(int, const struct iovec *, int, off_t, int);  /* preadv2 */
    ssize_t (*write)(int, const struct iovec *, int, off_t, int); /* pwritev2 */
};

extern struct functions of_others; /* Set once by hicache_bind, before anything else is called. */

/* -- pages in memory ----------------------------------------------------------------------------------------------- */

/* Page n lies in segment_count pieces: piece m at addresses[n * segment_count + m], of segments[m] bytes. */
struct memory {
    int64_t *addresses;
    int64_t *segments;
    int64_t segment_count;
    int64_t payload; /* Bytes of a page: the sum of segments. */
};

/* An array of the caller, and its length in words, or in rows of words. */
struct words {
    int64_t *at;
    int64_t count;
};

enum { KEY_WORDS = 6, IDENTITY_WORDS = 2, HASH_WORDS = 4 };

/* -- headers (docs/page-format.md) --------------------------------------------------------------------------------- */

enum {
    HEADER_WORDS = 16,
    HEADER_BYTES = 8 * HEADER_WORDS,
    KEY_WORD = 2,
    LENGTH_WORD = 8,
    CHECKSUM_WORD = 9,
    CREATED_WORD = 11,
    HEADER_CHECKSUM_WORD = 14,
    SEALED_BYTES = 8 * CREATED_WORD, /* What depends on the page alone. */
    CHECKED_BYTES = 8 * HEADER_CHECKSUM_WORD,
};

/* The checksum of the first `length` bytes of a header, as headers hold it: two words, big-endian. */
static inline void hash_of_header(const uint64_t *header, size_t length, uint64_t words[2])
{
    checksum found = of_others.hash(header, length);
    words[0] = __builtin_bswap64(found.high);
    words[1] = __builtin_bswap64(found.low);
}

/* The words of a header that depend on the page alone. `start`: the first 16 bytes of every header. */
static inline void write_sealed(uint64_t *header, const int64_t start[2], const int64_t *key, int64_t payload,
                                checksum of_payload)
{
    memcpy(header, start, 16);
    memcpy(header + KEY_WORD, key, 8 * KEY_WORDS);
    header[LENGTH_WORD] = (uint64_t)payload;
    header[CHECKSUM_WORD] = __builtin_bswap64(of_payload.high);
    header[CHECKSUM_WORD + 1] = __builtin_bswap64(of_payload.low);
}

/* The rest of a header, behind write_sealed. `created`: wall-clock milliseconds. */
static inline void finish_header(uint64_t *header, int64_t created)
{
    header[CREATED_WORD] = (uint64_t)created;
    memset(header + CREATED_WORD + 1, 0, 8 * (HEADER_CHECKSUM_WORD - CREATED_WORD - 1));
    hash_of_header(header, CHECKED_BYTES, header + HEADER_CHECKSUM_WORD);
}

/* The checksum of a page's payload. `state` is the caller's, of of_others.new_state. */
static inline checksum checksum_of(void *state, const struct memory *memory, int64_t page)
{
    const int64_t *at = memory->addresses + page * memory->segment_count;
    if (memory->segment_count == 1)
        return of_others.hash((const void *)at[0], (size_t)memory->payload);
    of_others.reset(state);
    for (int64_t segment = 0; segment < memory->segment_count; segment++)
        of_others.update(state, (const void *)at[segment], (size_t)memory->segments[segment]);
    return of_others.digest(state);
}

#endif
