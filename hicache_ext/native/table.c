/* The operations on the words of a slab index, which all processes on a directory map; index_words.py in
 * storage/tiers/file/slab says what each word means.
 *
 *   rows        a row per slot; authoritative
 *   sets        a hash table of the pages, WAYS entries a set; an entry counts only if the row it names says the same
 *   header      counts, the clock, the measured reuse distance, the policy
 *   identities  a row for each namespace of pages: its generation, and when it was cleared
 *   ghosts      facts about pages that were evicted
 *   events      a ring of uses that the miniatures have not processed yet
 *   small, entries: what the miniatures know
 *   tenants     a row for each tenant: 64 bits of its name, and about how many pages it has
 *
 * Who may call: locate, touch and ranks need no lock, and may see a page that has just gone or come; what
 * is read from a slot is checked by its seal. Everything else is called under the change lock of the directory, which
 * one thread of one process holds; without it a slot may be given to two writers, and one of their pages is lost.
 *
 * A row says PENDING until all of it is written, and one store of STATE, a release, makes it a page. A lookup reads
 * STATE first, with acquire. So a kill between any two stores never causes a wrong page to be served: at worst a page
 * has no entry, and its slot is reused once it is cold; or a count is off by one.
 *
 * Other processes may have damaged any word. Each is read once, by load(), and is used as a position only if it lies in
 * its part. Structs are the caller's and trusted: lengths are those of its arrays, `identity_count` is a power of two,
 * `set_count`, `ghost_sets`, `event_count` and `capacity` are at least 1, `entry_sets` is a power of two from 4 on, and
 * what it knows of slabs (`known`, `slabs`) lies in the rows.
 */
#include <stdbool.h>
#include <stdlib.h>

#include "core.h"

/* Of a row. USED: the clock at the last counted use << CLOCK_SHIFT | place in the chain << HITS_BITS | uses. */
enum { HASH, STATE, LENGTH, CREATED, SEAL, PRIORITY = SEAL + 2, USED, ROW_WORDS };
/* LENGTH: payload bytes, and above them the number of the page's tenant, 0 for the default one. */
enum { TENANT_SHIFT = 32, TENANTS = 64, TENANT_PAGES = 1, TENANT_WORDS };
#define LENGTHS INT64_C(0xFFFFFFFF)
/* Low bits of STATE. A page: its generation << 8 | its identity << NUMBER_SHIFT; a pending slot: its writer << 8. */
enum { UNKNOWN, FREE, PENDING, PAGE, STATES = 3, NUMBER_SHIFT = 40 };
#define GENERATIONS INT64_C(0xFFFFFFFF)

/* Of the header, as far as they are used here. */
enum { SETS = 3, REMEMBERED, INSERTS = 11, DISTANCE_SUM, REUSES, POLICY, TO_RANK, EVENTS, LEARNED, SEEN, TWICE_TTL = 21 };

/* Of a slab; of an identity. */
enum { SLAB_NUMBER, SLOTS = 2, FIRST, SLAB_STATE, FREE_SLOTS, CURSOR, OF, SLAB_WORDS, READY = 2 };
enum { GENERATION = 2, CLEARED, WRITTEN = 6, INDEX_IDENTITY_WORDS = 8 };
enum { LOOKS = 4, WAYS = 16, HITS_BITS = 3, MOST_DEPTH = 65535, DEPTH_BITS = 16, CLOCK_SHIFT = 19, ROW_BITS = 40 };
enum { SAMPLE_SHIFT = 24, SAMPLE = (1 << 20) - 1 };
#define ROW_MASK ((INT64_C(1) << ROW_BITS) - 1)
#define TAG_MASK ((INT64_C(1) << 23) - 1)
#define NO_PAGE INT64_MAX /* Rank of a slot that cannot be taken now. */
#define OWN (INT64_C(1) << 62) /* The ranks of pages that only their own tenant may take. */
enum { AT_ONCE = -1 };    /* The rank of one that is free, or whose content can no longer be asked for. */

struct table {
    int64_t *rows, row_count;
    int64_t *sets, set_count;
    int64_t *identities, identity_count;
    int64_t *events, event_count;
    int64_t *header, *small, *tenants;
    int64_t *ghosts, ghost_sets;  /* Three planes: fingerprints, numbers, USED. */
    int64_t *entries, entry_sets; /* Three planes: HASH, moment, held. */
};

/* -- words --------------------------------------------------------------------------------------------------------- */

static inline int64_t load(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static inline void store(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
static inline void add(int64_t *word, int64_t more) { store(word, load(word) + more); }

static inline int64_t *row_at(const struct table *table, int64_t row) { return table->rows + row * ROW_WORDS; }
static inline bool has_row(const struct table *table, int64_t row) { return row >= 0 && row < table->row_count; }
static inline int64_t state_of(const int64_t *row) { return __atomic_load_n(row + STATE, __ATOMIC_ACQUIRE); }

static inline int64_t *identity_at(const struct table *table, int64_t number)
{
    return table->identities + (number & (table->identity_count - 1)) * INDEX_IDENTITY_WORDS;
}

/* The STATE of a page of this identity that was not cleared. */
static inline int64_t state_for(const struct table *table, int64_t number)
{
    return PAGE | (load(identity_at(table, number) + GENERATION) & GENERATIONS) << 8 | number << NUMBER_SHIFT;
}

static inline bool is_page(int64_t state) { return (state & STATES) == PAGE; }

/* Return whether a page of this STATE was not cleared. */
static inline bool is_current(const struct table *table, int64_t state)
{
    int64_t generation = load(identity_at(table, state >> NUMBER_SHIFT) + GENERATION);
    return (state >> 8 & GENERATIONS) == (generation & GENERATIONS);
}

static inline int64_t tenant_of(const int64_t *row) { return load(row + LENGTH) >> TENANT_SHIFT & (TENANTS - 1); }

/* Return the page count of this row's tenant. Cleared pages count until their slots are free. */
static inline int64_t *tenant_pages(const struct table *table, const int64_t *row)
{
    return table->tenants + tenant_of(row) * TENANT_WORDS + TENANT_PAGES;
}

/* -- ranks --------------------------------------------------------------------------------------------------------- */
/*
 * storage/tiers/file/eviction.py describes them; tests/rigs/ranks.py has them in Python, with reasons for each number.
 * Damaged words give an arbitrary rank; they never overflow into a trap (-fwrapv, and no divisor below 1).
 */

enum { MAX_HITS = 7, KEPT_FOR = 2 };
enum { RENEWAL_SHIFT = 4 }; /* A use within 1/16 of min(D, capacity) after the last counted one is no hit and no reuse. */
enum { LAST_USE, LEARNED_DISTANCE, KEEP_FIRST, POLICIES };
#define ORIGIN (INT64_C(1) << 50)
#define TICK INT64_C(1024)

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
static inline int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

static inline int64_t reuse_distance(int64_t capacity, int64_t distance_sum, int64_t reuses)
{
    if (reuses <= 0)
        return capacity;
    return least(distance_sum / least(reuses, 1 << 11), 64 * capacity);
}

/* Count one more reuse, after this many inserts. */
static inline void learn_distance(int64_t *distance_sum, int64_t *reuses, int64_t distance)
{
    int64_t forgotten = *reuses >= 1 << 11 ? *distance_sum >> 11 : 0;
    *distance_sum += distance - forgotten;
    *reuses = least(*reuses + 1, (INT64_C(1) << 32) - 1);
}

/* `capacity`: at least 1. `hits`: 0 to MAX_HITS. `is_new`: written now; else used. */
static inline int64_t priority_of(int64_t policy, int64_t capacity, int64_t inserts, int64_t distance, int64_t hits,
                                  bool is_new, int64_t depth)
{
    static const int64_t LOG2[MAX_HITS + 1] = {0, 256, 406, 512, 594, 662, 719, 768};
    int64_t credit = 0, tail = depth;
    if (policy == LEARNED_DISTANCE) {
        int64_t times = least(4 * 256, most(256, 64 * distance / capacity)); /* In 256ths. */
        credit = least(distance * times / 256, 64 * capacity) * LOG2[hits & MAX_HITS] / LOG2[1];
        tail += TICK / 128 * least(distance, capacity) * least(depth, 64);
    } else if (policy == KEEP_FIRST && is_new) {
        credit = -KEPT_FOR * most(distance, capacity);
    }
    return least(ORIGIN + TICK * (inserts + credit) - tail, INT64_MAX);
}

/* -- hashes and sets ----------------------------------------------------------------------------------------------- */

static inline uint64_t scrambled(uint64_t word)
{
    word ^= word << 13;
    word ^= word >> 7;
    return word ^ word << 17;
}

static inline int64_t hash_of(const int64_t *keys, int64_t of)
{
    const int64_t *words = keys + of * KEY_WORDS + IDENTITY_WORDS;
    uint64_t word = 0;
    for (int at = 0; at < HASH_WORDS; at++)
        word = scrambled(word ^ (uint64_t)words[at]);
    return (int64_t)word;
}

/* Hash of a page: the low bits, which depend on every bit of the key, choose the set; the high bits are the tag. */
static inline uint64_t mixed(int64_t hash, int64_t number)
{
    uint64_t word = scrambled((uint64_t)hash ^ (uint64_t)number << 7);
    word ^= word >> 32;
    word ^= word >> 16;
    return word ^ word >> 8;
}

static inline uint64_t mixed_of(const int64_t *row)
{
    return mixed(load(row + HASH), load(row + STATE) >> NUMBER_SHIFT);
}

static inline int64_t tag_of(uint64_t word) { return (int64_t)(word >> ROW_BITS) & TAG_MASK; }
static inline int64_t entry_for(uint64_t word, int64_t row) { return tag_of(word) << ROW_BITS | (row + 1); }
static inline int64_t row_in(int64_t entry) { return (entry & ROW_MASK) - 1; }

/* The power of two of which there are so many sets and up to as many more. */
static inline int64_t level_of(int64_t sets) { return (int64_t)(UINT64_C(1) << (63 - __builtin_clzll((uint64_t)sets | 1))); }

/* Linear hashing: sets are added in order, each as a copy of the set with which it shares the pages from then on. In
 * each of the two, entries of the other one's pages are stale. */
static inline int64_t *set_of(const struct table *table, uint64_t word)
{
    int64_t sets = __atomic_load_n(table->header + SETS, __ATOMIC_ACQUIRE), level = level_of(sets);
    int64_t at = (int64_t)(word & (uint64_t)(2 * level - 1));
    if (at >= sets)
        at = (int64_t)(word & (uint64_t)(level - 1));
    return table->sets + (at >= 0 && at < table->set_count ? at : 0) * WAYS;
}

/* Return the row of a page; -1 if there is none. */
static int64_t row_of(const struct table *table, int64_t hash, int64_t number, int64_t state)
{
    uint64_t word = mixed(hash, number);
    for (int look = 0; look < LOOKS; look++) {
        int64_t sets = __atomic_load_n(table->header + SETS, __ATOMIC_ACQUIRE);
        const int64_t *set = set_of(table, word);
        for (int way = 0; way < WAYS; way++) {
            int64_t entry = load(set + way);
            if (entry >> ROW_BITS != tag_of(word))
                continue;
            int64_t row = row_in(entry);
            if (has_row(table, row) && state_of(row_at(table, row)) == state && load(row_at(table, row) + HASH) == hash)
                return row;
        }
        /* If sets were added meanwhile, its entry may be in another one. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (load(table->header + SETS) == sets)
            break;
    }
    return -1;
}

/* Whether the page of this row was written before `oldest` (milliseconds; 0: none is expired), or is dated as far ahead
 * of now as that is back, by a clock that was ahead. */
static inline bool is_expired(const struct table *table, const int64_t *row, int64_t oldest)
{
    int64_t created = load(row + CREATED), most = load(table->header + TWICE_TTL);
    return created < oldest || (oldest > 0 && most > 0 && created - oldest > most);
}

/* row_of, trying the row after `before` first (-1: none). Pages written together are neighbours, and the next row is
 * in the processor's cache, where the sets are not. A page written before `oldest` may be the remains, after a kill, of
 * one that was written again since. */
static inline int64_t row_behind(const struct table *table, int64_t hash, int64_t number, int64_t state,
                                 int64_t oldest, int64_t before)
{
    int64_t row = before + 1;
    if (row > 0 && row < table->row_count) {
        const int64_t *of = row_at(table, row);
        if (state_of(of) == state && load(of + HASH) == hash && !is_expired(table, of, oldest))
            return row;
    }
    return row_of(table, hash, number, state);
}

/* Forget a page and free its slot. Its entry no longer counts. */
static void free_page(const struct table *table, int64_t at)
{
    int64_t *row = row_at(table, at);
    add(tenant_pages(table, row), -1);
    store(row + STATE, FREE);
}

/* Add the entry of a page. A full set evicts the page with the lowest priority. Returns how many it evicted: mostly 0. */
static int64_t enter(const struct table *table, uint64_t word, int64_t row)
{
    int64_t *set = set_of(table, word), lowest = NO_PAGE, lost = -1;
    int chosen = 0;
    for (int way = 0; way < WAYS; way++) {
        int64_t entry = load(set + way), other = row_in(entry);
        const int64_t *of = row_at(table, has_row(table, other) ? other : row);
        bool stale = !has_row(table, other) || other == row || !is_page(load(of + STATE)) ||
                     entry_for(mixed_of(of), other) != entry || set_of(table, mixed_of(of)) != set;
        if (stale || way == 0 || load(of + PRIORITY) < lowest) {
            chosen = way;
            lowest = load(of + PRIORITY);
            lost = stale ? -1 : other;
        }
        if (stale)
            break;
    }
    store(set + chosen, entry_for(word, row));
    if (lost < 0)
        return 0;
    free_page(table, lost);
    return 1;
}

struct add_sets {
    const struct table *table;
    int64_t wanted;
};

/* Grow to `wanted` sets. A lookup finds a page in the set that was copied or in the copy. Under the lock. Returns the
 * number of sets. */
PUBLIC int64_t hicache_add_sets(const struct add_sets *call)
{
    const struct table *table = call->table;
    for (int64_t new = most(1, load(table->header + SETS)); new < least(call->wanted, table->set_count); new++) {
        int64_t *to = table->sets + new * WAYS, *from = table->sets + (new - level_of(new)) * WAYS;
        for (int way = 0; way < WAYS; way++)
            store(to + way, load(from + way));
        __atomic_store_n(table->header + SETS, new + 1, __ATOMIC_RELEASE);
    }
    return load(table->header + SETS);
}

/* -- lookup -------------------------------------------------------------------------------------------------------- */

/* The row of a page that was not written before `oldest`, else -1. `last`: the row looked at before, and then now. */
static inline int64_t look_up(const struct table *table, const int64_t *keys, int64_t of, int64_t number,
                              int64_t oldest, int64_t *last)
{
    int64_t state = state_for(table, number);
    *last = number < 0 ? -1 : row_behind(table, hash_of(keys, of), number, state, oldest, *last);
    return *last >= 0 && !is_expired(table, row_at(table, *last), oldest) ? *last : -1;
}

/* Identity number of the page at `of`: there is one number each, or one for all; -1 for an unknown identity. */
static inline int64_t number_of(struct words numbers, int64_t of) { return numbers.at[numbers.count == 1 ? 0 : of]; }

/* Return the slab, of those sorted by FIRST, that has this row; NULL if none has. */
static const int64_t *slab_with(struct words slabs, int64_t row)
{
    int64_t low = 0, high = slabs.count; /* The first one that begins behind it is among these. */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (slabs.at[middle * SLAB_WORDS + FIRST] <= row)
            low = middle + 1;
        else
            high = middle;
    }
    const int64_t *found = slabs.at + (low - 1) * SLAB_WORDS;
    return low > 0 && row < found[FIRST] + found[SLOTS] ? found : NULL;
}

struct locate {
    const struct table *table;
    struct words keys, numbers;
    int64_t oldest;       /* Pages written before it (wall-clock milliseconds) are not found. */
    struct words slabs;   /* The caller's copy, by FIRST. */
    struct words located; /* Receives, a row of as many words as there are keys for each: slab number, slot, payload
                           * length, position, row. NULL: stop at the first page that is not there. */
};

enum { IN_ORDER = 1, ONE_LENGTH = 2, ONE_SLAB = 4, FACTS = 3 };

/* Find pages. No lock. Returns how many were found << FACTS | flags: their places ascend, they have one length, they
 * are in one slab. */
PUBLIC int64_t hicache_locate(const struct locate *call)
{
    int64_t *located = call->located.at, many = call->keys.count, count = 0, last = -1;
    int64_t facts = IN_ORDER | ONE_LENGTH | ONE_SLAB, last_place = -1, begin = 0, end = 0;
    const int64_t *slab = NULL;
    for (int64_t of = 0; of < many; of++) {
        int64_t row = look_up(call->table, call->keys.at, of, number_of(call->numbers, of), call->oldest, &last);
        if (located == NULL) {
            if (row < 0)
                break;
            count++;
            continue;
        }
        if (row < 0)
            continue;
        if (row < begin || row >= end) {
            begin = end = 0;
            slab = slab_with(call->slabs, row);
            if (slab == NULL)
                continue; /* Of a slab that was dropped just now, or is not known yet. */
            begin = slab[FIRST];
            end = begin + slab[SLOTS];
        }
        int64_t size = load(row_at(call->table, row) + LENGTH) & LENGTHS, slab_number = slab[SLAB_NUMBER];
        int64_t place = slab_number << 32 | (row - begin);
        located[count] = slab_number;
        located[many + count] = row - begin;
        located[2 * many + count] = size;
        located[3 * many + count] = of;
        located[4 * many + count] = row;
        facts &= ~(place > last_place ? 0 : IN_ORDER) & ~(size == located[2 * many] ? 0 : ONE_LENGTH);
        facts &= ~(slab_number == located[0] ? 0 : ONE_SLAB);
        last_place = place;
        count++;
    }
    return count << FACTS | facts;
}

/* -- uses ---------------------------------------------------------------------------------------------------------- */

/* Return whether the miniatures, which see `sampled` of SAMPLE + 1 pages, see a page with this HASH. */
static inline bool is_sampled(int64_t hash, int64_t sampled) { return (hash >> SAMPLE_SHIFT & SAMPLE) < sampled; }

/* Note a use for the miniatures if they see this page. One of two simultaneous uses may be lost. Returns whether it
 * counts: a use that finds no place does not, whether it would have been seen or not. */
static bool note(const struct table *table, int64_t hash, int64_t inserts, int64_t depth, int64_t sampled)
{
    int64_t noted = load(table->header + EVENTS);
    if (noted - load(table->header + LEARNED) >= table->event_count)
        return false;
    if (!is_sampled(hash, sampled))
        return true;
    int64_t *event = table->events + 2 * ((uint64_t)noted % (uint64_t)table->event_count);
    store(event, hash);
    store(event + 1, inserts << DEPTH_BITS | least(depth, MOST_DEPTH));
    store(table->header + EVENTS, noted + 1);
    return true;
}

static inline int64_t used_word(int64_t clock, int64_t depth, int64_t hits)
{
    return clock << CLOCK_SHIFT | least(depth, MOST_DEPTH) << HITS_BITS | hits;
}

static inline int64_t distance_of(const struct table *table, int64_t capacity)
{
    return reuse_distance(capacity, load(table->header + DISTANCE_SUM), load(table->header + REUSES));
}

struct touch {
    const struct table *table;
    struct words chain; /* The rows of its pages, in its order; a row may be -1. */
    int64_t capacity; /* Slots, of all sizes. */
    int64_t sampled;  /* How many pages the miniatures see; 0: nobody looks at them. */
};

/* Note a use of the pages of a chain. No lock: if a row is given to another page meanwhile, that page's rank is a
 * little wrong. Returns how many ranks changed. */
PUBLIC int64_t hicache_touch(const struct touch *call)
{
    const struct table *table = call->table;
    int64_t *header = table->header, changed = 0, seen = 0, before = -1, capacity = call->capacity;
    int64_t inserts = load(header + INSERTS), policy = load(header + POLICY);
    int64_t distance = distance_of(table, capacity);
    bool leads = true;
    for (int64_t depth = 0; depth < call->chain.count; depth++) {
        int64_t at = call->chain.at[depth], *row = row_at(table, has_row(table, at) ? at : 0);
        if (!has_row(table, at) || !is_page(state_of(row))) {
            before = -1;
            leads = false;
            continue;
        }
        if (leads)
            seen += note(table, load(row + HASH), inserts, depth, call->sampled);
        int64_t priority = load(row + PRIORITY), word = load(row + USED);
        int64_t old_priority = priority, old_word = word;
        int64_t used = word >> CLOCK_SHIFT, place = word >> HITS_BITS & MOST_DEPTH, hits = word & MAX_HITS;
        if (used < inserts - (least(capacity, distance) >> RENEWAL_SHIFT)) {
            int64_t distance_sum = load(header + DISTANCE_SUM), reuses = load(header + REUSES);
            learn_distance(&distance_sum, &reuses, most(0, inserts - used));
            store(header + DISTANCE_SUM, distance_sum);
            store(header + REUSES, reuses);
            distance = reuse_distance(capacity, distance_sum, reuses);
            hits = least(hits + 1, MAX_HITS);
            used = inserts;
        }
        priority = most(priority, priority_of(policy, capacity, inserts, distance, hits, false, depth));
        if (before >= 0)
            priority = most(0, least(priority, before - 1));
        word = used_word(used, place, hits);
        if (priority != old_priority || word != old_word) {
            store(row + PRIORITY, priority);
            store(row + USED, word);
            changed++;
        }
        before = priority;
    }
    if (call->sampled > 0)
        add(header + SEEN, seen);
    return changed;
}

struct rank_again {
    const struct table *table;
    int64_t capacity, most; /* At most so many rows. */
};

/* Rank by the current policy the rows that an earlier one has ranked. Pages found by a rebuild keep their rank by age.
 * Under the lock; a simultaneous touch may lose its use. Returns how many rows remain. */
PUBLIC int64_t hicache_rank_again(const struct rank_again *call)
{
    const struct table *table = call->table;
    int64_t behind = least(load(table->header + TO_RANK), table->row_count), begin = most(0, behind - call->most);
    int64_t distance = distance_of(table, call->capacity), policy = load(table->header + POLICY);
    for (int64_t at = begin; at < behind; at++) {
        int64_t *row = row_at(table, at), word = load(row + USED), clock = word >> CLOCK_SHIFT;
        if (!is_page(state_of(row)) || clock <= 0)
            continue;
        int64_t hits = word & MAX_HITS, depth = word >> HITS_BITS & MOST_DEPTH;
        int64_t rank = priority_of(policy, call->capacity, clock, distance, hits, false, depth);
        store(row + PRIORITY, most(0, rank));
    }
    store(table->header + TO_RANK, begin);
    return begin;
}

/* -- ghosts -------------------------------------------------------------------------------------------------------- */

/* The set of a page of this HASH and STATE in the first plane, and its fingerprint, which is never 0. */
static int64_t *ghosts_of(const struct table *table, int64_t hash, int64_t state, int64_t *fingerprint)
{
    *fingerprint = (int64_t)(scrambled((uint64_t)(hash ^ state >> 8)) | 1);
    return table->ghosts + (*fingerprint >> 1 & 0xFFFFFFFF) % table->ghost_sets * WAYS;
}

/* Remember the evicted page of this row. It replaces its own older ghost, or else the oldest of its set. */
static void remember(const struct table *table, const int64_t *row)
{
    int64_t plane = table->ghost_sets * WAYS, fingerprint, now = load(table->header + REMEMBERED) + 1;
    int64_t *ghost = ghosts_of(table, load(row + HASH), load(row + STATE), &fingerprint), oldest = 0;
    int chosen = 0;
    store(table->header + REMEMBERED, now);
    for (int way = 0; way < WAYS; way++) {
        if (load(ghost + way) == fingerprint) {
            chosen = way;
            break;
        }
        int64_t number = load(ghost + plane + way);
        if (way == 0 || number < oldest) {
            chosen = way;
            oldest = number;
        }
    }
    store(ghost + chosen, fingerprint);
    store(ghost + plane + chosen, now);
    store(ghost + 2 * plane + chosen, load(row + USED));
}

/* Remove the ghost of this page; returns its USED, -1 without a ghost newer than `oldest`. */
static int64_t recall(const struct table *table, int64_t hash, int64_t state, int64_t oldest)
{
    int64_t plane = table->ghost_sets * WAYS, fingerprint;
    int64_t *ghost = ghosts_of(table, hash, state, &fingerprint);
    for (int way = 0; way < WAYS; way++, ghost++) {
        if (load(ghost) != fingerprint)
            continue;
        int64_t number = load(ghost + plane), used = load(ghost + 2 * plane);
        store(ghost, 0);
        store(ghost + plane, 0);
        return number > oldest ? used : -1;
    }
    return -1;
}

/* -- slots --------------------------------------------------------------------------------------------------------- */

struct take_free {
    const struct table *table;
    struct words slabs;      /* The slabs, which others may have damaged, */
    struct words known;      /* and the caller's copy, checked, which says where they lie. */
    struct words of_size;    /* The positions in both of those to look at. */
    int64_t pending, ticket; /* STATE and HASH of a slot that the caller writes. */
    struct words taken;      /* Receives as many rows as it has places for, in order of place as far as possible. */
};

/* Make free slots pending. A slab that claims to have some is searched once, a million rows in some ten milliseconds.
 * Under the lock. Returns the number taken. */
PUBLIC int64_t hicache_take_free(const struct take_free *call)
{
    int64_t done = 0;
    for (int64_t which = 0; which < call->of_size.count && done < call->taken.count; which++) {
        int64_t *slab = call->slabs.at + call->of_size.at[which] * SLAB_WORDS;
        const int64_t *known = call->known.at + call->of_size.at[which] * SLAB_WORDS;
        int64_t free = load(slab + FREE_SLOTS), slots = known[SLOTS], left = slots;
        if (free <= 0 || load(slab + SLAB_STATE) != READY)
            continue;
        int64_t at = load(slab + CURSOR);
        for (; left > 0 && done < call->taken.count; at++, left--) {
            if (at >= slots || at < 0)
                at = 0;
            int64_t *row = row_at(call->table, known[FIRST] + at);
            if (load(row + STATE) != FREE)
                continue;
            store(row + HASH, call->ticket);
            store(row + STATE, call->pending);
            call->taken.at[done++] = known[FIRST] + at;
            free--;
        }
        store(slab + CURSOR, at);
        /* A free slot that was not counted is found among the coldest. */
        store(slab + FREE_SLOTS, left > 0 ? most(0, free) : 0);
    }
    return done;
}

/* Of a caller that writes for a tenant. A tenant keeps so many pages whoever else writes. */
struct tenancy {
    int64_t shares[TENANTS];
    int64_t writer; /* Its number, -1: nobody's. */
};

/* A tenant's pages up to its share are NO_PAGE for others, and for itself the last to go. */
static int64_t rank_for(const struct table *table, const int64_t *row, const struct tenancy *tenancy, int64_t rank)
{
    rank = least(rank, OWN - 1);
    if (load(tenant_pages(table, row)) > tenancy->shares[tenant_of(row)])
        return rank;
    return tenant_of(row) == tenancy->writer ? least(OWN + rank, NO_PAGE - 1) : NO_PAGE;
}

static int64_t rank_of(const struct table *table, const int64_t *row, int64_t oldest, const struct tenancy *tenancy)
{
    int64_t state = state_of(row);
    if (!is_page(state))
        return (state & STATES) == FREE ? AT_ONCE : NO_PAGE;
    if (!is_current(table, state) || is_expired(table, row, oldest))
        return AT_ONCE;
    int64_t rank = most(0, least(load(row + PRIORITY), NO_PAGE - 1));
    return tenancy == NULL ? rank : rank_for(table, row, tenancy, rank);
}

struct ranks {
    const struct table *table;
    struct words rows;
    int64_t oldest;
    struct words tenancy; /* One, or NULL where there are no tenants. */
    struct words ranks;   /* Receives them. */
};

/* The ranks of some slots. No lock. Returns how many there are. */
PUBLIC int64_t hicache_ranks(const struct ranks *call)
{
    const struct tenancy *tenancy = (const struct tenancy *)call->tenancy.at;
    for (int64_t of = 0; of < call->rows.count; of++) {
        const int64_t *row = row_at(call->table, call->rows.at[of]);
        call->ranks.at[of] = rank_of(call->table, row, call->oldest, tenancy);
    }
    return call->rows.count;
}

struct evict {
    const struct table *table;
    struct words victims; /* Rows; one becomes -1 where the slot is not free then. */
    int64_t oldest;
    struct words tenancy; /* As for ranks. */
};

/* Free each victim that may be taken, including pending ones: their writers have ended. Under the lock. Returns the
 * number of pages evicted, without those that nobody could request any more. */
PUBLIC int64_t hicache_evict(const struct evict *call)
{
    const struct table *table = call->table;
    const struct tenancy *tenancy = (const struct tenancy *)call->tenancy.at;
    int64_t pages = 0;
    for (int64_t position = 0; position < call->victims.count; position++) {
        int64_t at = call->victims.at[position], *row = row_at(table, at);
        bool is_left = (load(row + STATE) & STATES) == PENDING;
        int64_t rank = is_left ? AT_ONCE : rank_of(table, row, call->oldest, tenancy);
        if (rank == NO_PAGE) {
            call->victims.at[position] = -1;
            continue;
        }
        if (rank != AT_ONCE) {
            remember(table, row);
            pages++;
        }
        if (is_page(load(row + STATE)))
            free_page(table, at);
        store(row + STATE, FREE);
    }
    return pages;
}

struct find {
    const struct table *table;
    struct words hashes; /* Of pages of one identity, which has this number. */
    int64_t number;
    struct words rows; /* Receives the row of each, -1 where there is none. */
};

/* Find pages by HASH alone. Under the lock. Returns how many there are. */
PUBLIC int64_t hicache_find(const struct find *call)
{
    int64_t count = 0, state = state_for(call->table, call->number);
    for (int64_t of = 0; of < call->hashes.count; of++) {
        call->rows.at[of] = row_of(call->table, call->hashes.at[of], call->number, state);
        count += call->rows.at[of] >= 0;
    }
    return count;
}

/* -- writing pages ------------------------------------------------------------------------------------------------- */

/* Fill a row; the last store makes it a page. Returns how many pages its entry has evicted. */
static int64_t make_page(const struct table *table, int64_t at, int64_t state, int64_t hash)
{
    int64_t number = state >> NUMBER_SHIFT;
    __atomic_store_n(row_at(table, at) + STATE, state, __ATOMIC_RELEASE);
    int64_t lost = enter(table, mixed(hash, number), at);
    store(identity_at(table, number) + WRITTEN, 1);
    add(tenant_pages(table, row_at(table, at)), 1);
    return lost;
}

struct publish {
    const struct table *table;
    struct words keys, numbers;             /* A chain; as for locate. */
    struct words positions, taken, lengths; /* Page keys[positions[n]] is in row taken[n]. */
    int64_t pending, ticket;
    int64_t created, oldest;                /* When they were written (milliseconds); as for locate. */
    int64_t capacity, ghost_limit, sampled; /* Slots, of all sizes; ghosts worth remembering; as for touch. */
    int64_t tenant;                         /* Whose pages they are. */
    struct words published; /* Receives 1; 0 for a page that is there already: the slot that was taken for it becomes
                             * free; -1 for a slot that is no longer this writer's. */
};

/* Return the highest rank that the page after this one in the chain may have. */
static int64_t highest_behind(const struct publish *call, int64_t key)
{
    int64_t number = number_of(call->numbers, key);
    int64_t row = row_of(call->table, hash_of(call->keys.at, key), number, state_for(call->table, number));
    return row >= 0 ? most(0, load(row_at(call->table, row) + PRIORITY) - 1) : 0;
}

/* Make pages of slots that are written, with their seals. Under the lock. Returns how many were published. */
PUBLIC int64_t hicache_publish(const struct publish *call)
{
    const struct table *table = call->table;
    int64_t *header = table->header, capacity = call->capacity;
    int64_t oldest_ghost = most(0, load(header + REMEMBERED) - call->ghost_limit);
    int64_t inserts = load(header + INSERTS), moment = inserts, policy = load(header + POLICY), seen = 0;
    int64_t distance_sum = load(header + DISTANCE_SUM), reuses = load(header + REUSES);
    int64_t distance = reuse_distance(capacity, distance_sum, reuses), highest = NO_PAGE - 1, count = 0;
    for (int64_t of = 0; of < call->taken.count; of++) {
        int64_t at = call->taken.at[of], key = call->positions.at[of];
        call->published.at[of] = -1;
        if (!has_row(table, at) || key < 0 || key >= call->keys.count)
            continue;
        int64_t *row = row_at(table, at), number = number_of(call->numbers, key);
        if (of == 0 || key == 0 || call->positions.at[of - 1] != key - 1)
            highest = key > 0 ? highest_behind(call, key - 1) : NO_PAGE - 1;
        if (load(row + STATE) != call->pending || load(row + HASH) != call->ticket || number < 0)
            continue;
        int64_t hash = hash_of(call->keys.at, key), state = state_for(table, number);
        int64_t there = row_of(table, hash, number, state);
        if (there >= 0 && !is_expired(table, row_at(table, there), call->oldest)) {
            call->published.at[of] = 0;
            store(row + STATE, FREE);
            highest = most(0, load(row_at(table, there) + PRIORITY) - 1);
            continue;
        }
        if (there >= 0)
            free_page(table, there);
        inserts++;
        int64_t hits = 0, ghost = recall(table, hash, state, oldest_ghost);
        if (ghost >= 0) {
            learn_distance(&distance_sum, &reuses, most(0, inserts - (ghost >> CLOCK_SHIFT)));
            distance = reuse_distance(capacity, distance_sum, reuses);
            hits = least((ghost & MAX_HITS) + 1, MAX_HITS);
        }
        seen += note(table, hash, moment, key, call->sampled);
        int64_t priority = priority_of(policy, capacity, inserts, distance, hits, true, key);
        priority = most(0, least(highest, priority));
        store(row + HASH, hash);
        store(row + LENGTH, (call->lengths.at[of] & LENGTHS) | (call->tenant & (TENANTS - 1)) << TENANT_SHIFT);
        store(row + CREATED, call->created);
        store(row + PRIORITY, priority);
        store(row + USED, used_word(inserts, key, hits));
        make_page(table, at, state, hash);
        call->published.at[of] = 1;
        count++;
        highest = most(0, priority - 1);
    }
    if (call->sampled > 0)
        add(header + SEEN, seen);
    store(header + INSERTS, inserts);
    store(header + DISTANCE_SUM, distance_sum);
    store(header + REUSES, reuses);
    return count;
}

struct adopt {
    const struct table *table;
    struct words keys, numbers, lengths, created; /* One number of an identity each; -1: no page. */
    struct words seals;                           /* Two words each. */
    int64_t first; /* The row of the first one. */
    int64_t slot_size, now;
};

/* For a rebuild, adopt the pages that headers describe in slots that are still UNKNOWN. Of several pages with one key
 * the newest counts. They rank by age, below all pages written from now on. Under the lock. Returns the number of pages
 * found, less those that they replace. */
PUBLIC int64_t hicache_adopt(const struct adopt *call)
{
    const struct table *table = call->table;
    int64_t found = 0;
    for (int64_t of = 0; of < call->keys.count && has_row(table, call->first + of); of++) {
        int64_t at = call->first + of, *row = row_at(table, at), number = call->numbers.at[of];
        if (load(row + STATE) != UNKNOWN)
            continue;
        /* Read before CLEARED: if a clear comes in between, the page gets the old generation and is not found. */
        int64_t state = state_for(table, most(0, number)), length = call->lengths.at[of], created = call->created.at[of];
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        bool fits = number >= 0 && length >= 0 && length <= call->slot_size;
        if (!fits || created <= load(identity_at(table, number) + CLEARED)) {
            store(row + STATE, FREE);
            continue;
        }
        int64_t hash = hash_of(call->keys.at, of), there = row_of(table, hash, number, state);
        if (there >= 0) {
            if (load(row_at(table, there) + CREATED) >= created) {
                store(row + STATE, FREE);
                continue;
            }
            free_page(table, there);
            found--;
        }
        store(row + HASH, hash);
        store(row + LENGTH, length);
        store(row + CREATED, created);
        store(row + SEAL, call->seals.at[2 * of]);
        store(row + SEAL + 1, call->seals.at[2 * of + 1]);
        store(row + PRIORITY, most(0, ORIGIN - most(0, call->now - created)));
        store(row + USED, 0);
        found += 1 - make_page(table, at, state, hash);
    }
    return found;
}

/* -- miniatures ---------------------------------------------------------------------------------------------------- */
/*
 * Caches of a sample of the pages, one for each policy, and which of them serves most: see
 * docs/decisions/eviction.md, and index_words.py. A miniature holds no pages: `entries` is
 * one table of what is known of the sample. A kill in the middle leaves numbers that are a little wrong: each eviction
 * counts anew.
 *
 * touch and publish note uses in a ring. A page is served only with all pages before it. The miniatures count the same
 * way if all pages are in the sample; in a partial sample each page counts on its own, which makes no difference there:
 * the pages before it are used whenever it is, so they outrank it.
 */

/* Planes of entries. MOMENT: the clock when the chain was used last << DEPTH_BITS | place in it. HELD: the clock at the
 * last counted use << COUNTED_SHIFT | uses << USES_SHIFT | two bits for each miniature. */
enum { KEY, MOMENT, HELD };
enum { CANDIDATES = POLICIES, MINIATURES = CANDIDATES + 3, USES_SHIFT = 2 * MINIATURES, COUNTED_SHIFT = USES_SHIFT + HITS_BITS };
enum { ABSENT, NEW, KEPT = 3 }; /* NEW: not used since it was written, nor there when all that was there counted as kept. */
/* Words of small. For each miniature: pages held; all hits. For each candidate: hits since the last comparison
 * (choose_policy in index_words.py). */
enum { HELD_PAGES = 0, HITS = 16, LATELY = 32 };
/* All uses seen; those that the policy of that time had; uses of all pages that fall to the sample, times SAMPLE + 1;
 * what the table was made for; up to which use of all pages EXPECTED counts. Of this chain: a bit for each miniature that
 * held all of it so far; the place of the last page; the clock at its first one. */
enum { USES = 24, SERVED, EXPECTED, SETS_USED = 29, SAMPLED, COUNTED, RUN = 40, PLACE, BEGAN };

enum { MOST_USES = 1 << 19 }; /* Then they are halved: what was long ago counts less and less. */

/* A miniature holds up to so many more than its slots, and is then cut to so many less: on average it is full. */
static inline int64_t slack_of(int64_t slots) { return slots >> (slots > 512 ? 4 : 6); }

static inline int64_t bits_of(int64_t held, int miniature) { return held >> 2 * miniature & 3; }

static inline int64_t *entry_at(const struct table *table, int plane, int64_t place)
{
    return table->entries + plane * table->entry_sets * WAYS + place;
}

/* The capacity of a miniature in halves of the tier's. */
static inline int64_t halves_of(int miniature)
{
    static const int64_t SCALES[MINIATURES - CANDIDATES] = {1, 4, 8};
    return miniature < CANDIDATES ? 2 : SCALES[miniature - CANDIDATES];
}

static inline int64_t policy_now(const struct table *table)
{
    int64_t policy = load(table->header + POLICY);
    return policy >= 0 && policy < CANDIDATES ? policy : 0;
}

/* Make the entries fit another capacity: pages that are no longer in the sample go, all where there are other sets. */
static void make_for(const struct table *table, int64_t sets, int64_t sampled)
{
    bool other_sets = load(table->small + SETS_USED) != sets;
    if (!other_sets && load(table->small + SAMPLED) == sampled)
        return;
    for (int64_t place = 0; place < table->entry_sets * WAYS; place++)
        if (other_sets || !is_sampled(load(entry_at(table, KEY, place)), sampled))
            for (int plane = KEY; plane <= HELD; plane++)
                store(entry_at(table, plane, place), 0);
    store(table->small + SETS_USED, sets);
    store(table->small + SAMPLED, sampled);
    for (int miniature = 0; miniature < MINIATURES; miniature++) {
        int64_t pages = 0;
        for (int64_t place = 0; place < sets * WAYS; place++)
            pages += bits_of(load(entry_at(table, HELD, place)), miniature) != ABSENT;
        store(table->small + HELD_PAGES + miniature, pages);
    }
}

/* Where the page of this hash is in its set; where it is not there, it replaces the one used longest ago that no
 * miniature holds, or that any holds. */
static int64_t place_for(const struct table *table, int64_t of_set, int64_t hash)
{
    int64_t chosen = of_set * WAYS, oldest = INT64_MAX;
    for (int64_t place = of_set * WAYS; place < (of_set + 1) * WAYS; place++) {
        if (load(entry_at(table, KEY, place)) == hash)
            return place;
        int64_t age = load(entry_at(table, MOMENT, place));
        if (load(entry_at(table, HELD, place)) & ((1 << USES_SHIFT) - 1))
            age |= INT64_C(1) << 62;
        if (age < oldest) {
            chosen = place;
            oldest = age;
        }
    }
    int64_t held = load(entry_at(table, HELD, chosen));
    for (int miniature = 0; miniature < MINIATURES; miniature++)
        add(table->small + HELD_PAGES + miniature, -(bits_of(held, miniature) != ABSENT));
    store(entry_at(table, KEY, chosen), hash);
    store(entry_at(table, MOMENT, chosen), -1);
    store(entry_at(table, HELD, chosen), 0);
    return chosen;
}

/* The lowest rank that so many of these are not above. */
static int64_t kth_lowest(const int64_t *ranks, int64_t count, int64_t which)
{
    int64_t low = INT64_MIN, high = INT64_MAX;
    while (low < high) {
        int64_t middle = (low & high) + ((low ^ high) >> 1), below = 0; /* The mean, without an overflow. */
        for (int64_t of = 0; of < count; of++)
            below += ranks[of] <= middle;
        if (below >= which)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Have a miniature hold a little less than its slots: those with the lowest priorities go. */
static void cut(const struct table *table, int64_t sets, int miniature, int64_t slots, int64_t capacity)
{
    int64_t places = sets * WAYS, count = 0, policy = miniature < CANDIDATES ? miniature : policy_now(table);
    int64_t of_tier = most(1, capacity * halves_of(miniature) / 2), distance = distance_of(table, of_tier);
    int64_t *ranks = malloc((size_t)(2 * places) * sizeof *ranks), *at = ranks + places;
    if (ranks == NULL)
        return; /* It is tried again with the next use. */
    for (int64_t place = 0; place < places; place++) {
        int64_t held = load(entry_at(table, HELD, place)), bits = bits_of(held, miniature);
        if (bits == ABSENT)
            continue;
        int64_t moment = load(entry_at(table, MOMENT, place)), hits = held >> USES_SHIFT & MAX_HITS;
        ranks[count] = priority_of(policy, of_tier, moment >> DEPTH_BITS, distance, hits, bits == NEW, moment & MOST_DEPTH);
        at[count++] = place;
    }
    int64_t wanted = most(1, slots - slack_of(slots)), excess = count - wanted;
    if (excess > 0) {
        int64_t threshold = kth_lowest(ranks, count, excess);
        for (int64_t of = 0; of < count && excess > 0; of++) {
            if (ranks[of] > threshold)
                continue;
            int64_t *held = entry_at(table, HELD, at[of]);
            store(held, load(held) & ~(INT64_C(3) << 2 * miniature));
            excess--;
        }
        count = wanted;
    }
    store(table->small + HELD_PAGES + miniature, count);
    free(ranks);
}

/* One use, by an event. */
static void see(const struct table *table, int64_t sets, int64_t sampled, int64_t window, int64_t hash, int64_t moment)
{
    int64_t *small = table->small, of_set = (int64_t)(scrambled((uint64_t)hash) & 0xFFFFFFFF) % sets;
    int64_t place = place_for(table, of_set, hash), held = load(entry_at(table, HELD, place));
    int64_t clock = moment >> DEPTH_BITS, depth = moment & MOST_DEPTH, run = load(small + RUN), counted = clock;
    if (depth == 0 || depth <= load(small + PLACE)) {
        store(small + BEGAN, clock);
        run = depth == 0 ? -1 : 0; /* The tier lacks a page before it. */
    }
    if (sampled <= SAMPLE)
        run = -1;
    store(small + PLACE, depth);
    store(entry_at(table, MOMENT, place), least(clock, load(small + BEGAN)) << DEPTH_BITS | depth);
    int64_t uses = held >> USES_SHIFT & MAX_HITS;
    bool counts = held != 0 && clock - (held >> COUNTED_SHIFT) > window;
    if (counts)
        uses = least(uses + 1, MAX_HITS);
    else if (held != 0)
        counted = held >> COUNTED_SHIFT;
    int64_t now_held = counted << COUNTED_SHIFT | uses << USES_SHIFT;
    for (int miniature = 0; miniature < MINIATURES; miniature++) {
        int64_t bits = bits_of(held, miniature);
        if (bits == ABSENT) {
            run &= ~(INT64_C(1) << miniature);
            add(small + HELD_PAGES + miniature, 1);
            bits = NEW;
        } else if (counts) {
            bits = KEPT;
        }
        int64_t hit = run >> miniature & 1;
        add(small + HITS + miniature, hit);
        if (miniature < CANDIDATES)
            add(small + LATELY + miniature, hit);
        now_held |= bits << 2 * miniature;
    }
    store(small + RUN, run);
    add(small + USES, 1);
    add(small + SERVED, run >> policy_now(table) & 1);
    store(entry_at(table, HELD, place), now_held);
}

struct learn {
    const struct table *table;
    int64_t capacity, sampled; /* As for touch. */
    int64_t most;              /* Uses. */
};

/* Look at some of the uses that were noted. Under the lock. Returns how many. */
PUBLIC int64_t hicache_learn(const struct learn *call)
{
    const struct table *table = call->table;
    int64_t *header = table->header, *small = table->small, capacity = call->capacity, sampled = call->sampled;
    int64_t sets = 4;
    while (sets < table->entry_sets && sets < capacity)
        sets *= 2;
    make_for(table, sets, sampled);
    int64_t seen = load(header + SEEN);
    add(small + EXPECTED, most(0, seen - load(small + COUNTED)) * sampled);
    store(small + COUNTED, seen);
    int64_t learned = load(header + LEARNED), done = most(0, least(call->most, load(header + EVENTS) - learned));
    int64_t distance = distance_of(table, capacity), window = least(capacity, distance) >> RENEWAL_SHIFT;
    for (int64_t of = 0; of < done; of++) {
        const int64_t *event = table->events + 2 * ((uint64_t)(learned + of) % (uint64_t)table->event_count);
        int64_t hash = load(event), moment = load(event + 1);
        store(header + LEARNED, learned + of + 1);
        see(table, sets, sampled, window, hash, moment);
        for (int miniature = 0; miniature < MINIATURES; miniature++) {
            int64_t slots = most(1, (capacity * sampled * halves_of(miniature) / 2) >> 20);
            if (load(small + HELD_PAGES + miniature) > slots + slack_of(slots))
                cut(table, sets, miniature, slots, capacity);
        }
    }
    if (load(small + USES) >= MOST_USES)
        for (int word = HITS; word <= EXPECTED; word++)
            store(small + word, load(small + word) >> 1);
    return done;
}
