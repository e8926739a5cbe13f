/* The entry points of the library. */
#define _GNU_SOURCE
#include <errno.h>

#include "core.h"

struct functions of_others;

/* The version of the sources that this library was built from; Python compares it with that of its own sources. */
PUBLIC const uint64_t hicache_version = HICACHE_VERSION;

/* Take the external functions. `digests` receives the checksum of `sample` twice, as headers hold it: computed in one
 * piece, and in two. Returns 0, or -ENOMEM without memory for the second. */
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
