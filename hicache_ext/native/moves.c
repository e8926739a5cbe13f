/* Pages moved between slots of slabs and host memory, with their headers and seals; headers and files of pages checked.
 *
 * The pages of a call are sorted by place. Neighbours move in one system call, at most as many bytes at once as stay in
 * the processor's cache until they are hashed. A page that was read is good only if the seal of its key, its length and
 * the checksum of its payload is the one in the index (envelope.page_seal). Other pages are left to Python, which finds
 * out why.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "core.h"

enum { DONE, LOOK_AGAIN }; /* Results of a page; a negative one is -errno. */
enum {
    MOST_VECTORS = 1024, /* IOV_MAX */
    MOST_HEADERS = 128,  /* Pages written by one system call. */
    BLOCK = 4096,        /* Slots are whole ones, and so are the portions of a large page, for O_DIRECT. */
};

struct opened_slab {
    int64_t number;
    int64_t slots; /* A descriptor, and that of the file of headers. */
    int64_t headers;
    int64_t first_row; /* That of slot 0 in the index. */
};

struct move_pages {
    /* Page n is in slot slots[n] of the slab with number slabs[n]; in memory, and in keys, it is positions[n]. */
    const int64_t *slabs;
    const int64_t *slots;
    const int64_t *positions;
    const struct opened_slab *opened;
    int64_t *addresses; /* As in struct memory. */
    int64_t *segments;
    const int64_t *keys;
    const int64_t *start; /* The first 16 bytes of every header. */
    uint64_t *rows;       /* Of the index. */
    int64_t *results;     /* What became of each page; LOOK_AGAIN at first. */
    int64_t *taken;       /* How many pages threads have taken; 0 at first. */
    int64_t into_memory;  /* 1: read. 0: write, with headers and seals. */
    int64_t page_count;
    int64_t opened_count;
    int64_t segment_count;
    int64_t payload;
    int64_t slot_size; /* Bytes: those of the payload, and at most a block more. */
    int64_t created;   /* What new headers say, wall-clock milliseconds. */
    int64_t flags;     /* Of preadv2 and pwritev2. */
    int64_t at_once;   /* Bytes that a thread takes and moves at a time, unless a page has more. */
    int64_t row_count;
    int64_t row_words;
    int64_t seal_word; /* The first of the two of a seal in a row. */
};

/* What a thread moves: neighbours, and its memory for that. */
struct run {
    const struct move_pages *call;
    struct memory memory;
    void *state;        /* Of a hash. */
    int64_t begin, end; /* Pages: the first, and one behind the last. */
    int64_t taken_to;   /* One behind the last page that this thread has taken. */
    const struct opened_slab *slab;
    int64_t slot;
    uint64_t *seals; /* That of the first page. */
    struct iovec vectors[MOST_VECTORS];
    uint64_t headers[MOST_HEADERS * HEADER_WORDS];
    char filler[BLOCK]; /* Moved to and from what is behind a payload: zeros when written. */
};

/* Find the next pages of this thread, at most `most`; return 0 if threads have taken all. */
static int next_run(struct run *run, int64_t most)
{
    const struct move_pages *call = run->call;
    if (run->end == run->taken_to) {
        int64_t step = call->at_once > call->slot_size ? call->at_once / call->slot_size : 1;
        run->end = __atomic_fetch_add(call->taken, step, __ATOMIC_RELAXED);
        if (run->end >= call->page_count)
            return 0;
        run->taken_to = step < call->page_count - run->end ? run->end + step : call->page_count;
    }
    int64_t at = run->begin = run->end;
    do
        at++;
    while (at < run->taken_to && at - run->begin < most && call->slabs[at] == call->slabs[at - 1] &&
           call->slots[at] == call->slots[at - 1] + 1);
    run->end = at;
    return 1;
}

/* Find where a run is. Return 0 if there are no such slots or rows: others write the memory of these numbers. */
static int find_place(struct run *run)
{
    const struct move_pages *call = run->call;
    int64_t count = run->end - run->begin, end;
    run->slab = NULL;
    for (int64_t one = 0; one < call->opened_count; one++)
        if (call->opened[one].number == call->slabs[run->begin])
            run->slab = &call->opened[one];
    run->slot = call->slots[run->begin];
    if (!run->slab || run->slot < 0 || run->slab->first_row < 0 || run->slab->first_row > call->row_count ||
        run->slot > call->row_count - run->slab->first_row - count)
        return 0;
    run->seals = call->rows + (run->slab->first_row + run->slot) * call->row_words + call->seal_word;
    return !__builtin_mul_overflow(run->slot + count, call->slot_size, &end);
}

/* Move `count` vectors. Returns the bytes, or -errno; 0, as if nothing was there, where the call was interrupted or asked
 * for something that this file system does not do. */
static int64_t move(struct run *run, int64_t descriptor, int count, int64_t offset, int64_t flags)
{
    ssize_t moved = (run->call->into_memory ? of_others.read : of_others.write)(
        (int)descriptor, run->vectors, count, offset, (int)flags);
    int is_of_the_disk = errno > 0 && errno != EINVAL && errno != EOPNOTSUPP && errno != EINTR;
    return moved >= 0 ? moved : is_of_the_disk ? -errno : 0;
}

/* Move all pages of a run at once, with what is between them. Returns as move. */
static int64_t move_together(struct run *run)
{
    const struct move_pages *call = run->call;
    size_t gap = (size_t)(call->slot_size - call->payload);
    int count = 0;
    for (int64_t page = run->begin; page < run->end; page++) {
        const int64_t *at = call->addresses + call->positions[page] * call->segment_count;
        for (int64_t segment = 0; segment < call->segment_count; segment++)
            run->vectors[count++] = (struct iovec){(void *)at[segment], (size_t)call->segments[segment]};
        if (gap && page + 1 < run->end)
            run->vectors[count++] = (struct iovec){run->filler, gap};
    }
    return move(run, run->slab->slots, count, run->slot * call->slot_size, call->flags);
}

/* Read one page in portions, and hash each while it is in the processor's cache. Returns as move. */
static int64_t read_large_page(struct run *run, checksum *of_payload)
{
    const struct move_pages *call = run->call;
    const int64_t *at = call->addresses + call->positions[run->begin] * call->segment_count;
    /* About equal ones: a small remainder would cost a system call of its own. */
    int64_t portions = call->payload > call->at_once ? call->payload / call->at_once : 1;
    int64_t portion = (call->payload + portions - 1) / portions;
    portion = (portion + BLOCK - 1) / BLOCK * BLOCK;
    int64_t total = 0, done = 0;
    int count = 0;
    of_others.reset(run->state);
    for (int64_t segment = 0; segment < call->segment_count; segment++) {
        for (int64_t begin = 0, length; begin < call->segments[segment]; begin += length) {
            length = portion - total > BLOCK ? portion - total : BLOCK;
            if (length > call->segments[segment] - begin)
                length = call->segments[segment] - begin;
            run->vectors[count++] = (struct iovec){(char *)at[segment] + begin, (size_t)length};
            total += length;
            if (done + total < call->payload && total < portion && count < MOST_VECTORS)
                continue;
            int64_t offset = run->slot * call->slot_size + done;
            int64_t moved = move(run, run->slab->slots, count, offset, call->flags);
            if (moved != total)
                return moved < 0 ? moved : done + moved;
            for (int vector = 0; vector < count; vector++)
                of_others.update(run->state, run->vectors[vector].iov_base, run->vectors[vector].iov_len);
            done += moved;
            total = count = 0;
        }
    }
    *of_payload = of_others.digest(run->state);
    return done;
}

/* Write the leading words of the header of a page with this checksum, and its seal. */
static void seal_page(const struct run *run, int64_t position, checksum of_payload, uint64_t *header, uint64_t *seal)
{
    const struct move_pages *call = run->call;
    write_sealed(header, call->start, call->keys + position * KEY_WORDS, call->payload, of_payload);
    hash_of_header(header, SEALED_BYTES, seal);
}

/* Read a run into memory and check it. Returns how many of its pages are DONE. */
static int64_t read_run(struct run *run)
{
    const struct move_pages *call = run->call;
    int large = run->end - run->begin == 1 && call->slot_size > call->at_once;
    checksum of_payload;
    int64_t moved = large ? read_large_page(run, &of_payload) : move_together(run), done = 0;
    int whole = moved == (run->end - run->begin - 1) * call->slot_size + call->payload;
    for (int64_t page = run->begin; page < run->end; page++) {
        if (moved < 0)
            call->results[page] = moved;
        if (!whole)
            continue;
        if (!large)
            of_payload = checksum_of(run->state, &run->memory, call->positions[page]);
        uint64_t seal[2], *known = run->seals + (page - run->begin) * call->row_words;
        seal_page(run, call->positions[page], of_payload, run->headers, seal);
        if (known[0] == seal[0] && known[1] == seal[1]) {
            call->results[page] = DONE;
            done++;
        }
    }
    return done;
}

/* Write a run to its slots, then its headers. Its seals are in the index before: the slots are this caller's, nobody
 * reads those yet. Returns how many pages are DONE: all or none. */
static int64_t write_run(struct run *run)
{
    const struct move_pages *call = run->call;
    int64_t pages = run->end - run->begin, length = pages * HEADER_BYTES, result = LOOK_AGAIN;
    for (int64_t page = 0; page < pages; page++) {
        int64_t position = call->positions[run->begin + page];
        uint64_t *header = run->headers + page * HEADER_WORDS;
        checksum of_payload = checksum_of(run->state, &run->memory, position);
        seal_page(run, position, of_payload, header, run->seals + page * call->row_words);
        finish_header(header, call->created);
    }
    int64_t moved = move_together(run);
    if (moved == (pages - 1) * call->slot_size + call->payload) {
        run->vectors[0] = (struct iovec){run->headers, (size_t)length};
        moved = move(run, run->slab->headers, 1, run->slot * HEADER_BYTES, 0);
        result = moved == length ? DONE : LOOK_AGAIN;
    }
    for (int64_t page = run->begin; page < run->end; page++)
        call->results[page] = moved < 0 ? moved : result;
    return result == DONE ? pages : 0;
}

/* Move pages until all are taken; several threads may share one struct. Returns how many pages this thread marked DONE.
 * Others may be moved in part. Returns 0 for invalid sizes or without memory. */
PUBLIC int64_t hicache_move_pages(const struct move_pages *call)
{
    int64_t gap = call->slot_size - call->payload, done = 0;
    if (call->segment_count < 1 || call->segment_count >= MOST_VECTORS || call->payload < 0 || call->slot_size < 1 ||
        gap < 0 || gap > BLOCK || call->at_once < 1)
        return 0;
    struct run run;
    memset(run.filler, 0, sizeof run.filler);
    run.call = call;
    run.memory = (struct memory){call->addresses, call->segments, call->segment_count, call->payload};
    run.end = run.taken_to = 0;
    run.state = of_others.new_state();
    int64_t most = MOST_VECTORS / (call->segment_count + 1);
    if (!call->into_memory && most > MOST_HEADERS)
        most = MOST_HEADERS;
    while (run.state && next_run(&run, most))
        if (find_place(&run))
            done += call->into_memory ? read_run(&run) : write_run(&run);
    if (run.state)
        of_others.free_state(run.state);
    return done;
}

struct check_headers {
    const uint64_t *headers;
    int64_t header_count;
    const uint64_t *start; /* The first 16 bytes of every header. */
    uint64_t *seals;       /* Receives two words for each valid header. */
    uint8_t *valid;        /* Receives 1 for each that begins so and agrees with its checksum, 0 for the others. */
};

/* Returns 0. */
PUBLIC int64_t hicache_check_headers(const struct check_headers *call)
{
    for (int64_t page = 0; page < call->header_count; page++) {
        const uint64_t *header = call->headers + page * HEADER_WORDS;
        uint64_t found[2];
        call->valid[page] = 0;
        if (header[0] != call->start[0] || header[1] != call->start[1])
            continue;
        hash_of_header(header, CHECKED_BYTES, found);
        if (header[HEADER_CHECKSUM_WORD] != found[0] || header[HEADER_CHECKSUM_WORD + 1] != found[1])
            continue;
        hash_of_header(header, SEALED_BYTES, call->seals + 2 * page);
        call->valid[page] = 1;
    }
    return 0;
}

struct find_page_files {
    const uint8_t *keys; /* All of one identity. */
    int64_t key_count;
    int64_t directory; /* That of the identity: a descriptor. */
    int64_t least;     /* Bytes of a page file. */
    int64_t oldest;    /* When it was used last, wall-clock seconds. */
    uint8_t *present;  /* Receives 1 for each page with such a file, 0 for the others. */
};

/* A page's file is named by its hash, in a directory named by the first byte of that. Returns 0. */
PUBLIC int64_t hicache_find_page_files(const struct find_page_files *call)
{
    static const char digits[] = "0123456789abcdef";
    char path[] = "00/0000000000000000000000000000000000000000000000000000000000000000.page";
    for (int64_t page = 0; page < call->key_count; page++) {
        const uint8_t *hash = call->keys + 8 * (page * KEY_WORDS + IDENTITY_WORDS);
        for (int byte = 0; byte < 8 * HASH_WORDS; byte++) {
            path[3 + 2 * byte] = digits[hash[byte] >> 4];
            path[4 + 2 * byte] = digits[hash[byte] & 15];
        }
        memcpy(path, path + 3, 2);
        struct stat status;
        call->present[page] = fstatat((int)call->directory, path, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                              S_ISREG(status.st_mode) && status.st_size >= call->least &&
                              status.st_mtime >= call->oldest;
    }
    return 0;
}
