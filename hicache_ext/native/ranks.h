/* The ranks that storage/tiers/file/eviction.py tells of; tests/rigs/ranks.py has them in Python, and says why each
 * number. Words that another process may have damaged give some rank; they never overflow into a trap (-fwrapv, and no
 * divisor below 1). */
#ifndef HICACHE_RANKS_H
#define HICACHE_RANKS_H

#include <stdbool.h>
#include <stdint.h>

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

/* One more reuse, after so many inserts. */
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

#endif
