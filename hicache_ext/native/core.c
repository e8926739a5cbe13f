/* The doors of the library. */
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
