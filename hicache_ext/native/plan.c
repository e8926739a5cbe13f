/* Requests through the caches of a fleet on paper (plan/fleet.py), page by page: a cache of each node, and a pool that
 * they share. Priorities are those of the tiers (ranks.h), or the last use alone. The caches are memory of the call. */
#define _GNU_SOURCE
#include "core.h"
#include "ranks.h"
#include <errno.h>
#include <sys/mman.h>

enum { LAST_USE_ALONE = POLICIES }; /* A policy of plans only: least recently used, whatever the depth; no ghosts. */

/* A page that is in the cache, or a ghost: one that was evicted and is remembered. */
struct entry {
    int64_t priority, used;
    int32_t block;
    int32_t place;         /* In the heap, from 1; 0 is a ghost. */
    int32_t older, newer;  /* Of ghosts: a ring, in which entry 0 is between the newest and the oldest. */
    int8_t hits; /* As in eviction.py. */
};

struct cache {
    struct state { int64_t count, inserts, distance_sum, reuses, written, evicted, ghosts; } state;
    int64_t policy, capacity, most_ghosts, mask;
    int64_t used; /* Entries that ever were in use. */
    int32_t free; /* The first of those that are free now, linked by `newer`; 0 is none. */
    struct entry *entries;
    int32_t *heap;  /* Entries by priority and block, from heap[1]. */
    int32_t *table; /* Entries by block, or 0; at least half of it is 0. */
};

/* Where an entry or the gap for it is in the table: the first place from its home with this block, or with none. */
static int64_t place_of(const struct cache *cache, int32_t block)
{
    uint32_t mixed = (uint32_t)block * UINT32_C(0x9E3779B1);
    int64_t at = (mixed ^ mixed >> 15) & cache->mask;
    while (cache->table[at] && cache->entries[cache->table[at]].block != block)
        at = (at + 1) & cache->mask;
    return at;
}

/* The entry of a page that is in the cache, or NULL. */
static struct entry *find(const struct cache *cache, int32_t block)
{
    struct entry *entry = cache ? cache->entries + cache->table[place_of(cache, block)] : NULL;
    return entry && entry->place ? entry : NULL;
}

static void put(struct cache *cache, int64_t place, int32_t number)
{
    cache->heap[place] = number;
    cache->entries[number].place = (int32_t)place;
}

static int is_before(const struct cache *cache, int32_t one, int32_t other)
{
    const struct entry *a = cache->entries + one, *b = cache->entries + other;
    return a->priority < b->priority || (a->priority == b->priority && a->block < b->block);
}

/* Puts an entry where it belongs in the heap, instead of what is at a place or from there. */
static void sift(struct cache *cache, int64_t place, int32_t number)
{
    int32_t *heap = cache->heap;
    for (; place > 1 && is_before(cache, number, heap[place / 2]); place /= 2)
        put(cache, place, heap[place / 2]);
    for (int64_t below; (below = 2 * place) <= cache->state.count; place = below) {
        below += below < cache->state.count && is_before(cache, heap[below + 1], heap[below]);
        if (!is_before(cache, heap[below], number))
            break;
        put(cache, place, heap[below]);
    }
    put(cache, place, number);
}

/* Takes a ghost out of the ring. */
static void unlink_ghost(struct cache *cache, int32_t number)
{
    struct entry *entries = cache->entries, *ghost = entries + number;
    entries[ghost->older].newer = ghost->newer;
    entries[ghost->newer].older = ghost->older;
    cache->state.ghosts--;
}

/* The first of the heap, whose place is free then, becomes a ghost; the oldest of too many is forgotten. */
static void evict(struct cache *cache)
{
    struct entry *entries = cache->entries;
    const int32_t victim = cache->heap[1], newest = entries->older;
    entries[victim].place = 0;
    entries[victim].newer = 0;
    entries[victim].older = newest;
    entries[newest].newer = entries->older = victim;
    cache->state.evicted++;
    if (++cache->state.ghosts <= cache->most_ghosts)
        return;
    const int32_t oldest = entries->newer;
    unlink_ghost(cache, oldest);
    int64_t at = place_of(cache, entries[oldest].block);
    cache->table[at] = 0;
    /* What follows may belong into the gap. */
    while (cache->table[at = (at + 1) & cache->mask]) {
        int32_t moved = cache->table[at];
        cache->table[at] = 0;
        cache->table[place_of(cache, entries[moved].block)] = moved;
    }
    entries[oldest].newer = cache->free;
    cache->free = oldest;
}

/* The priority of a page used now. `before`: that of the page before it in the request, or -1. */
static int64_t bounded(int64_t priority, int64_t before)
{
    return before < 0 ? priority : most(0, least(priority, before - 1));
}

static int64_t distance_of(const struct cache *cache)
{
    return reuse_distance(cache->capacity, cache->state.distance_sum, cache->state.reuses);
}

static int64_t rank(const struct cache *cache, const struct entry *entry, bool is_new, int64_t depth)
{
    return priority_of(cache->policy, cache->capacity, cache->state.inserts, distance_of(cache), entry->hits, is_new,
                       depth);
}

static void count_use(struct cache *cache, struct entry *entry)
{
    learn_distance(&cache->state.distance_sum, &cache->state.reuses, most(0, cache->state.inserts - entry->used));
    entry->hits = (int8_t)least(entry->hits + 1, MAX_HITS);
}

/* Writes a page that is absent; its priority. */
static int64_t insert(struct cache *cache, int32_t block, int64_t depth, int64_t before)
{
    struct state *state = &cache->state;
    int64_t place = 1;
    if (state->count == cache->capacity)
        evict(cache);
    else
        place = ++state->count;
    state->inserts++;
    state->written++;
    int64_t at = place_of(cache, block);
    int32_t number = cache->table[at];
    if (number) {
        unlink_ghost(cache, number);
        count_use(cache, cache->entries + number);
    } else {
        number = cache->free ? cache->free : (int32_t)++cache->used;
        cache->free = cache->entries[number].newer;
        cache->entries[number] = (struct entry){.block = block};
        cache->table[at] = number;
    }
    struct entry *entry = cache->entries + number;
    entry->used = state->inserts;
    entry->priority = cache->policy == LAST_USE_ALONE ? state->inserts : bounded(rank(cache, entry, true, depth), before);
    sift(cache, place, number);
    return entry->priority;
}

/* Uses a page that is there; its priority. */
static int64_t use(struct cache *cache, struct entry *entry, int64_t depth, int64_t before)
{
    struct state *state = &cache->state;
    int64_t priority = entry->priority;
    if (cache->policy == LAST_USE_ALONE) {
        priority = ++state->inserts;
    } else {
        if (entry->used < state->inserts - (least(cache->capacity, distance_of(cache)) >> RENEWAL_SHIFT)) {
            count_use(cache, entry);
            entry->used = state->inserts;
        }
        priority = bounded(most(priority, rank(cache, entry, false, depth)), before);
    }
    if (priority != entry->priority) {
        entry->priority = priority;
        sift(cache, entry->place, (int32_t)(entry - cache->entries));
    }
    return priority;
}

/* Returns so many empty caches, or NULL where they cannot be. The system gives memory when it is touched. */
static struct cache *new_caches(int64_t count, int64_t capacity, int64_t ghosts, int64_t policy, size_t *bytes)
{
    int64_t entries = 1 + capacity + ghosts, table = 2;
    if (capacity < 1 || entries > INT32_MAX)
        return NULL;
    while (table < 2 * entries)
        table *= 2;
    const int64_t each = entries * (int64_t)sizeof(struct entry) + 4 * ((1 + capacity + table + 1) / 2 * 2);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *bytes = (size_t)count * (sizeof(struct cache) + (size_t)each);
    struct cache *caches = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (caches == MAP_FAILED)
        return NULL;
    for (int64_t number = 0; number < count; number++) {
        struct entry *memory = (struct entry *)((char *)(caches + count) + number * each);
        int32_t *heap = (int32_t *)(memory + entries);
        struct cache empty = {.policy = policy, .capacity = capacity, .most_ghosts = ghosts, .mask = table - 1};
        empty.entries = memory, empty.heap = heap, empty.table = heap + 1 + capacity;
        caches[number] = empty;
    }
    return caches;
}

struct replay {
    const int64_t *offsets; /* Request n has the blocks from offsets[n] to offsets[n + 1]. */
    int64_t request_count;
    const int32_t *blocks;
    const int32_t *nodes; /* Of each request. */
    int64_t node_count;
    int64_t near_capacity; /* Blocks in the cache of a node; 0 is none. */
    int64_t near_ghosts;
    int64_t near_policy; /* Of ranks.h, or LAST_USE_ALONE. */
    int64_t pool_capacity;
    int64_t pool_ghosts;
    int64_t pool_policy;
    int64_t promotes;     /* Not 0: what comes from the pool is kept near. */
    int64_t hints;        /* Not 0: what decode nodes write is brought near. */
    const int64_t *ahead; /* Per request: from where to where in `blocks` is what a decode node writes to the pool at
                           * its end (equal: nothing), and where that prompt begins. */
    int64_t *out;         /* Per request, added to: pages from near, from the pool, computed, written near, written to
                           * the pool, and brought near by hints. */
    int64_t *states;      /* Receives struct state of each node's cache and of the pool, of those that there are. */
};

static void replay_request(const struct replay *call, int64_t request, struct cache *near, struct cache *pool)
{
    enum { NEAR, POOL, COMPUTED, WRITTEN_NEAR, WRITTEN_POOL, HINTED, COLUMNS };
    int64_t begin = call->offsets[request], end = call->offsets[request + 1], run = begin;
    int64_t *out = call->out + COLUMNS * request, before = -1, pool_before = -1;
    /* As a look-up: the leading run, each page wherever it is. */
    while (run < end && (find(near, call->blocks[run]) || find(pool, call->blocks[run])))
        run++;
    for (int64_t at = begin; at < end; at++) {
        int32_t block = call->blocks[at];
        struct entry *found = find(near, block);
        int was_near = found != NULL, is_new = at >= run;
        if (was_near) {
            before = use(near, found, at - begin, before);
        } else if (near && (is_new || call->promotes)) {
            before = insert(near, block, at - begin, before);
            out[WRITTEN_NEAR]++;
        } else {
            before = -1;
        }
        out[is_new ? COMPUTED : was_near ? NEAR : POOL]++;
        found = find(pool, block);
        if (found) {
            pool_before = was_near && !is_new ? found->priority : use(pool, found, at - begin, pool_before);
        } else if (pool && is_new) {
            pool_before = insert(pool, block, at - begin, pool_before);
            out[WRITTEN_POOL]++;
        } else {
            pool_before = -1; /* A page of the run that is near alone: nobody writes it again. */
        }
    }
    const int64_t *ahead = call->ahead + 3 * request;
    for (int64_t at = ahead[0]; at < ahead[1]; at++) {
        if (pool && !find(pool, call->blocks[at])) {
            insert(pool, call->blocks[at], at - ahead[2], -1);
            out[WRITTEN_POOL]++;
        }
        if (call->hints && near && !find(near, call->blocks[at])) {
            insert(near, call->blocks[at], at - ahead[2], -1);
            out[WRITTEN_NEAR]++;
            out[HINTED]++;
        }
    }
}

/* Returns 0; -ENOMEM; -EINVAL where a request is of no node: `out` has those before it then. */
PUBLIC int64_t hicache_replay(const struct replay *call)
{
    size_t near_bytes = 0, pool_bytes = 0;
    struct cache *near = NULL, *pool = NULL;
    const int64_t nodes = call->node_count;
    struct state *states = (struct state *)call->states;
    if (call->near_capacity)
        near = new_caches(nodes, call->near_capacity, call->near_ghosts, call->near_policy, &near_bytes);
    if (call->pool_capacity)
        pool = new_caches(1, call->pool_capacity, call->pool_ghosts, call->pool_policy, &pool_bytes);
    int64_t error = (call->near_capacity && !near) || (call->pool_capacity && !pool) ? -ENOMEM : 0;
    for (int64_t request = 0; !error && request < call->request_count; request++) {
        int32_t node = call->nodes[request];
        if (node < 0 || node >= nodes)
            error = -EINVAL;
        else
            replay_request(call, request, near ? near + node : NULL, pool);
    }
    for (int64_t node = 0; near && node < nodes; node++)
        states[node] = near[node].state;
    if (pool)
        states[nodes] = pool->state;
    munmap(near, near_bytes);
    munmap(pool, pool_bytes);
    return error;
}
